"""A run in fp16, or with moments in bf16, goes on from its checkpoint to the last bit."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from correctness.short_runs import Layout
from harness.marks import full
from harness.precisions import precision
from harness.rank_pool import RankPool
from training.test_checkpointing import JOB, Ended, assert_same, losses, run_on_rank

from megatron.checkpoint.settings import CheckpointSettings
from megatron.optimizer.settings import LossScaleSettings
from megatron.run.run_config import RunConfig

SCALE = LossScaleSettings(initial_loss_scale=2.0**21, hysteresis=1, loss_scale_window=2)
"""Overflows before the checkpoint, and a growth due after it."""


def prepared(layout: Layout, dtype: torch.dtype, **optimizer: Any) -> RunConfig:
    config = JOB.config(layout, dtype)
    return replace(
        config,
        train=replace(config.train, eval_interval=None),
        log=replace(config.log, peak_tflops=1.0),
        optimizer=replace(config.optimizer, **optimizer),
    )


def ended(
    ranks: RankPool, config: RunConfig, exit_interval: int | None = None, **checkpoint: Any
) -> list[Ended]:
    """Run to the end, or to a multiple of an iteration; return what the ranks left."""
    config = replace(
        config,
        train=replace(config.train, exit_interval=exit_interval),
        checkpoint=CheckpointSettings(**checkpoint),
    )
    found = ranks.run(run_on_rank, config.parallel.grid.world_size, config=config)
    assert all(isinstance(own, Ended) for own in found), found
    return found


def whole_and_resumed(
    ranks: RankPool, config: RunConfig, folder: Path, then: RunConfig | None = None
) -> tuple[list[Ended], list[Ended]]:
    """Run in one go, and in two halves, the second maybe in another configuration."""
    whole = ended(ranks, config)
    ended(ranks, config, 3, save=folder)
    return whole, ended(ranks, then or config, load=folder)


def scales(said: str) -> list[str]:
    return re.findall(r"loss scale: (\S+) ", said)


@pytest.mark.parametrize("post_validation", [full(False), True])
def test_fp16_goes_on_with_its_loss_scale(
    post_validation: bool, ranks: RankPool, tmp_path: Path
) -> None:
    layout = Layout(2, "vocab-2", replicas=2, sharded=True)
    config = prepared(layout, torch.float16, loss_scale=SCALE, post_validation=post_validation)
    whole, resumed = whole_and_resumed(ranks, config, tmp_path)
    assert_same(whole, resumed)
    assert scales(resumed[0].said) == scales(whole[0].said)[3:]
    assert losses(resumed[0].said) == losses(whole[0].said)[-len(losses(resumed[0].said)) :]
    assert len(set(scales(whole[0].said))) > 2, "it shrinks and grows"


def test_moments_are_kept_in_bf16(ranks: RankPool, tmp_path: Path) -> None:
    config = prepared(
        Layout(2, "vocab-2"), torch.bfloat16, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16"
    )
    config = replace(
        config,
        train=replace(config.train, precision=precision(torch.bfloat16, narrow_gradients=True)),
    )
    whole, resumed = whole_and_resumed(ranks, config, tmp_path)
    assert_same(whole, resumed)
    kinds = {name.split(".")[0]: parts[0][1].dtype for name, (_, parts) in resumed[0].held.items()}
    assert kinds == {
        "weight": torch.float32,
        "exp_avg": torch.bfloat16,
        "exp_avg_sq": torch.bfloat16,
    }


def test_moments_are_rounded_where_the_run_keeps_fewer_bits(
    ranks: RankPool, tmp_path: Path
) -> None:
    """Of an fp32 checkpoint; nothing but their rounding tells the runs apart."""
    wide = prepared(Layout(1, "none"), torch.bfloat16)
    narrow = replace(wide, optimizer=replace(wide.optimizer, exp_avg_dtype="bf16"))
    [whole], [resumed] = whole_and_resumed(ranks, wide, tmp_path, then=narrow)
    squares: dict[str, list[float]] = {}
    for name, (_, parts) in whole.held.items():
        kind = name.split(".")[0]
        for (_, value), (_, other) in zip(parts, resumed.held[name][1], strict=True):
            assert (other.dtype == torch.bfloat16) == (kind == "exp_avg")
            error, size = squares.setdefault(kind, [0.0, 0.0])
            difference = value.double() - other.double()
            squares[kind] = [error + float(difference.norm()) ** 2, size + float(value.norm()) ** 2]
    assert all(0 < error < 0.02**2 * size for error, size in squares.values()), squares
