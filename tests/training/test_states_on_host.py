"""Runs with states of the optimizer on the host have the bits of runs without, checkpoints too."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from correctness.short_runs import Layout
from harness.marks import full
from harness.rank_pool import RankPool
from training.test_checkpointing import Ended, assert_same, losses, run_on_rank
from training.test_precision_checkpoints import SCALE, prepared

from megatron.checkpoint.settings import CheckpointSettings
from megatron.optimizer.settings import HostStateSettings
from megatron.run.run_config import RunConfig


@dataclass(frozen=True)
class Halves:
    """A run in two halves.

    Attributes:
        layout: of the ranks.
        dtype: of the weights.
        before: states on the host in the half that saves a checkpoint.
        after: states on the host in the half that loads the checkpoint.
        optimizer: further settings.
    """

    layout: Layout
    dtype: torch.dtype
    before: HostStateSettings | None
    after: HostStateSettings | None
    optimizer: dict[str, Any]

    def __str__(self) -> str:
        shares = [
            0.0 if own is None else own.optimizer_offload_fraction
            for own in (self.before, self.after)
        ]
        options = "-".join(self.optimizer)
        return f"{self.layout}-{self.dtype}-{shares[0]}-{shares[1]}-{options}"


HALF, ALL = (
    HostStateSettings(True, 0.5),
    HostStateSettings(True, 1.0, overlap_cpu_optimizer_d2h_h2d=True),
)
SHARDED = replace(Layout(2, "vocab-2", replicas=2, sharded=True), bucket_size=3000)

CASES = [
    Halves(replace(SHARDED, overlap=True), torch.bfloat16, ALL, HALF, {}),
    full(Halves(Layout(2, "vocab-2"), torch.float32, HALF, ALL, {})),
    Halves(Layout(2, "vocab-2"), torch.float16, HALF, None, {"loss_scale": SCALE}),
    full(Halves(SHARDED, torch.float32, None, ALL, {})),
    full(Halves(Layout(2, "none", "zb-h1"), torch.bfloat16, ALL, HALF, {"post_validation": True})),
    full(Halves(SHARDED, torch.float16, HALF, ALL, {"loss_scale": SCALE, "post_validation": True})),
    full(Halves(Layout(1, "none"), torch.bfloat16, HALF, ALL, {"optimizer": "sgd"})),
]


def ran(
    ranks: RankPool, config: RunConfig, states: HostStateSettings | None, **checkpoint: Any
) -> list[Ended]:
    exit_interval = 3 if "save" in checkpoint else None
    config = replace(
        config,
        train=replace(config.train, exit_interval=exit_interval, host_states=states),
        checkpoint=CheckpointSettings(**checkpoint),
    )
    ended = ranks.run(run_on_rank, config.parallel.grid.world_size, config=config)
    assert all(isinstance(own, Ended) for own in ended), ended
    return ended


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits_are_those_without(case: Halves, ranks: RankPool, tmp_path: Path) -> None:
    config = prepared(case.layout, case.dtype, **case.optimizer)
    whole = ran(ranks, config, None)
    begun = ran(ranks, config, case.before, save=tmp_path)
    resumed = ran(ranks, config, case.after, load=tmp_path)
    assert_same(whole, resumed)
    assert losses(begun[0].said) + losses(resumed[0].said) == losses(whole[0].said)
