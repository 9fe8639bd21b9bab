"""PyTorch's own pipeline runtime trains our plans, and our simulator knows PyTorch's schedules."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from harness.marks import full
from harness.rank_pool import RankPool
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from megatron.library.plans import (
    Plan,
    from_torch_csv,
    plan,
    simulate,
    to_torch_csv,
    torchtitan_schedule,
)

H: Final = 6
UNEVEN: Final = {"F": 2, "B": 3, "W": 1}
PLANS: Final[Mapping[str, dict[str, Any]]] = {
    "1f1b": {},
    "zb-auto": {"memory_limit": 6.0, "costs": UNEVEN},
    "interleaved": {"chunks": 3},
    "zb-v": {},
    "v-half": {"costs": UNEVEN},
    "v-min": {},
    "hanayo": {"chunks": 4},
    "dualpipe-v": {},
}


def whole_model(stages: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(H, H), nn.Tanh(), nn.LayerNorm(H)).double() for _ in range(stages)
    ]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


def batch(microbatches: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (2 * microbatches, H)
    x, target = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, target


def run_by_torch(rank: int, world_size: int, file: str) -> tuple[float, float]:
    """Run a file by PyTorch's runtime; return the largest fault of gradients and of losses."""
    made = from_torch_csv(Path(file).read_text())
    modules = whole_model(len(made.stages))
    device = torch.device("cpu")
    stages = [
        PipelineStage(modules[number], number, len(made.stages), device)
        for number, (owner, _) in enumerate(made.stages)
        if owner == rank
    ]
    runtime = schedules._PipelineScheduleRuntime(
        stages, made.microbatches, loss_fn=loss_of, scale_grads=False
    )
    runtime._load_csv(file)
    x, target = batch(made.microbatches)
    losses: list[Tensor] = []
    ends: dict[str, Any] = {}
    if made.stages[-1][0] == rank:
        ends = {"target": target, "losses": losses}
    runtime.step(*([x] if made.stages[0][0] == rank else []), **ends, return_outputs=False)
    own = [(number, modules[number]) for number in (stage.stage_index for stage in stages)]

    reference = whole_model(len(made.stages))
    parts = zip(x.chunk(made.microbatches), target.chunk(made.microbatches), strict=True)
    expected = [loss_of(nn.Sequential(*reference)(part), aim) for part, aim in parts]
    torch.stack(expected).sum().backward()
    faults = [
        float((mine.grad - theirs.grad).abs().max())
        for number, module in own
        for mine, theirs in zip(module.parameters(), reference[number].parameters(), strict=True)
        if mine.grad is not None and theirs.grad is not None
    ]
    assert len(faults) == 4 * len(own)
    assert len(losses) == (made.microbatches if made.stages[-1][0] == rank else 0)
    pairs = zip(losses, expected[: len(losses)], strict=True)
    return max(faults), max((float((a - b).detach().abs()) for a, b in pairs), default=0.0)


@pytest.mark.parametrize("world_size", [2, full(4)])
@pytest.mark.parametrize("schedule", PLANS)
def test_pytorch_trains_our_plans(
    ranks: RankPool, tmp_path: Path, schedule: str, world_size: int
) -> None:
    made = plan(schedule, world_size, 2 * world_size, **PLANS[schedule])
    file = tmp_path / "plan.csv"
    file.write_text(to_torch_csv(made))
    for gradient, loss in ranks.run(run_by_torch, world_size, file=str(file)):
        assert gradient < 1e-11
        assert loss < 1e-11


def stand_ins(ranks: int, chunks: int) -> list[Any]:
    """The stages of rank 0, as much of them as PyTorch's schedules ask for before they run."""
    own = {"num_stages": ranks * chunks, "group_size": ranks, "group_rank": 0}
    return [SimpleNamespace(**own, submod=nn.Identity()) for _ in range(chunks)]


def text_of(order: Mapping[int, list[Any]]) -> str:
    """The file that ``_dump_csv`` writes."""
    return "".join(
        ",".join("" if action is None else str(action) for action in order[rank]) + "\n"
        for rank in sorted(order)
    )


UNITS: Final = {"F": 0.5, "B": 0.5, "W": 0.5}
"""Of one chunk of two: a rank's F takes 1."""


def simulated(made: Plan) -> tuple[float, float]:
    timeline = simulate(made, UNITS)
    return timeline.end, timeline.idle()


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (3, 6)])
def test_pytorch_and_we_interleave_alike(p: int, m: int) -> None:
    theirs = schedules.ScheduleInterleaved1F1B(stand_ins(p, 2), m).pipeline_order
    assert from_torch_csv(text_of(theirs)) == plan("interleaved", p, m)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8)])
@pytest.mark.parametrize("name", ["ScheduleZBVZeroBubble", "ScheduleDualPipeV"])
def test_a_v_of_pytorch_is_read_and_simulated(name: str, p: int, m: int) -> None:
    runtime = getattr(schedules, name)(stand_ins(p, 2), m)
    made = from_torch_csv(text_of(runtime.pipeline_order))
    assert torchtitan_schedule(made) == "ZBVZeroBubble"
    assert made.split_backward
    assert from_torch_csv(text_of(runtime.pipeline_order_with_comms)) == made
    assert bool(made.pairs) == (name == "ScheduleDualPipeV")
    made = replace(made, pairs=frozenset())
    # Zero bubbles: m microbatches of F + B + W, and half a unit for each rank before the last.
    assert simulated(made)[0] == 3 * m + (p - 1) / 2
    assert simulated(made) == pytest.approx(simulated(plan("zb-v", p, m, costs=UNITS)))


def test_other_schedules_of_pytorch_are_read() -> None:
    for name in ("ScheduleLoopedBFS", "ScheduleInterleavedZeroBubble"):
        made = from_torch_csv(text_of(getattr(schedules, name)(stand_ins(4, 2), 8).pipeline_order))
        assert torchtitan_schedule(made) == "Interleaved1F1B"
        assert 0 < simulated(made)[1] < 0.2
