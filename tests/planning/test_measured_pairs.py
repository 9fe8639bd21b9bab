"""Measured passes hide in pairs what a count says that they wait for."""

from pathlib import Path
from typing import Any

import pytest

from megatron.planning.run_plan import make_run_plan
from megatron.run.command_line import parse
from megatron.run.run_config import RunConfig
from megatron.schedules.costs import Costs
from megatron.simulator.costs.cost_file import save_costs

MIXTURE = """--num-layers 8 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32
    --kv-channels 128 --group-query-attention --num-query-groups 4 --num-experts 32
    --moe-router-topk 8 --moe-ffn-hidden-size 768 --swiglu --disable-bias-linear
    --expert-model-parallel-size 4 --moe-token-dispatcher-type alltoall
    --overlap-moe-expert-parallel-comm --attention-dropout 0 --hidden-dropout 0"""

DENSE = """--num-layers 8 --hidden-size 4096 --num-attention-heads 32 --swiglu
    --tensor-model-parallel-size 4 --sequence-parallel --tp-comm-overlap
    --attention-dropout 0 --hidden-dropout 0"""


def config_of(flags: str, more: str = "") -> RunConfig:
    return parse(
        f"""--dry-run --dry-run-gpu H100 --dry-run-replicas 4 --bf16 {flags}
        --pipeline-model-parallel-size 2 --pipeline-schedule interleaved
        --num-virtual-stages-per-pipeline-rank 2 --vocab-parallel vocab-2 --vocab-size 32000
        --seq-length 4096 --micro-batch-size 1 --global-batch-size 32 --lr 1e-4
        --train-iters 1 {more}""".split(),
        1,
    )


def slower_by(factor: float, time: Any) -> Any:
    """Return ``time``, a number or nested lists of numbers, multiplied by ``factor``."""
    return [slower_by(factor, own) for own in time] if isinstance(time, list) else factor * time


@pytest.mark.parametrize("flags", [MIXTURE, DENSE], ids=["experts", "tensor"])
def test_a_plan_from_measured_times_has_pairs(flags: str, tmp_path: Path) -> None:
    """The measured passes take 1.25 times as long as the counted ones."""
    counted = make_run_plan(config_of(flags))
    costs = counted.costs
    slower = Costs(
        {kind: slower_by(1.25, time) for kind, time in costs.passes.items()},
        costs.comms,
        costs.exchanges,
    )
    file = tmp_path / "costs.json"
    layers = [[2, 2], [2, 2]]
    save_costs(file, slower, layers)
    measured = make_run_plan(config_of(flags, f"--measured-costs {file}"))
    assert measured.plan.pairs
    assert measured.costs.turns.keys() == costs.turns.keys()
    kinds = {first.kind for _, first in counted.plan.pairs}
    assert {first.kind for _, first in measured.plan.pairs} == kinds
