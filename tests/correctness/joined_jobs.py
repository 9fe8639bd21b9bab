"""Jobs whose plans have pairs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from unittest.mock import patch

import torch
from correctness.rank_runs import Batches, Pieces, RankRun, train_on_rank
from correctness.short_runs import Job, Layout
from schedules.paired import paired

from megatron.parallel.turns import Turns
from megatron.planning.run_plan import make_run_plan
from megatron.run.run_config import RunConfig
from megatron.runtime.executor import Executor
from megatron.runtime.observer import Observer
from megatron.runtime.rank_passes import Passes
from megatron.schedules.costs import Costs
from megatron.schedules.graph import Graph
from megatron.schedules.lower import Run
from megatron.schedules.make_plan import make_plan
from megatron.schedules.passes import BEGINNERS, PAUSING, PassKind
from megatron.schedules.settings import PairSettings
from megatron.schedules.turn_order import TurnOrder

WAITING = Costs(
    {"F": 2.0, "B": 2.0, "W": 1.0, "S": 0.25, "T": 0.25, "IF": 0.0, "IB": 0.0},
    waits={"F": 1.0, "B": 1.0},
)


def file_of(layout: Layout, microbatches: int, folder: Path) -> Path:
    """Save a plan with pairs: on CPUs, plans are made as if exchanges took no time."""
    made = make_plan(
        layout.schedule,
        layout.vocabulary,
        layout.ranks,
        microbatches,
        WAITING,
        slices=layout.slices,
        joined=True,
        memory_limit=2 * layout.ranks + 2,
    )
    assert made.pairs
    file = folder / "my.plan"
    file.write_text(made.to_text())
    return file


def config_of(
    job: Job, layout: Layout, *, overlap: bool, dtype: torch.dtype = torch.float32
) -> RunConfig:
    config = job.config(layout, dtype)
    pairs = PairSettings(overlap_moe_expert_parallel_comm=overlap)
    return replace(config, parallel=replace(config.parallel, pairs=pairs))


def in_pairs(
    job: Job, layout: Layout, folder: Path, *, joined: bool, dtype: torch.dtype = torch.float32
) -> RunConfig:
    """A run whose plan has random pairs; its passes take turns, or run one after the other."""
    plan = make_run_plan(job.config(layout)).plan
    file = folder / "my.plan"
    file.write_text(paired(plan, seed=1).to_text())
    config = job.config(replace(layout, schedule="file", file=file), dtype)
    pairs = PairSettings(tp_comm_overlap=joined)
    return replace(config, parallel=replace(config.parallel, pairs=pairs))


@contextmanager
def counted_turns() -> Iterator[Callable[[], int]]:
    """Count how often a pass hands over to another pass that is not over."""
    count = 0
    goes_on = Turns._has_further_piece

    def counted(self: Turns) -> bool:
        nonlocal count
        found = goes_on(self)
        count += not found
        return found

    with patch.object(Turns, "_has_further_piece", counted):
        yield lambda: count


def places_of_pairs(
    rank: int, world_size: int, *, config: RunConfig, batches: Batches
) -> list[tuple[tuple[PassKind, int], ...]]:
    """Train, and return at how many places each pass of each pair could switch."""
    found: list[tuple[tuple[PassKind, int], ...]] = []
    counts = [0, 0]
    run_step, hand_over, pause = Executor._run_step, Turns.hand_over, Turns.pause

    def counted_step(self: Executor, passes: Passes, step: Run, recorder: Observer | None) -> None:
        counts[:] = [0, 0]
        run_step(self, passes, step, recorder)
        if step.joined is not None:
            kinds = sorted((item.kind for item in step.passes), key=BEGINNERS.index)
            found.append(tuple(zip(kinds, counts, strict=True)))

    def counted_switch(self: Turns) -> None:
        counts[self._turn] += self.runs
        hand_over(self)

    def counted_pause(self: Turns) -> None:
        own, before = self._turn, counts[self._turn]
        pause(self)
        counts[own] += self.runs and self._pauses and counts[own] == before  # the lag

    with (
        patch.object(Executor, "_run_step", counted_step),
        patch.object(Turns, "hand_over", counted_switch),
        patch.object(Turns, "pause", counted_pause),
    ):
        train_on_rank(rank, world_size, config=config, batches=batches)
    return found


def drawn_turns(graph: Graph, one: int, other: int) -> TurnOrder | None:
    """Return turns of an F and a B that no times explain, the same on every rank; often none."""
    draw = Random(f"{one} {other}")
    kinds = {graph.passes[number].kind for number in (one, other)}
    if kinds != {"F", "B"} or draw.random() < 0.3:
        return None
    return TurnOrder(draw.choice(PAUSING), tuple(draw.choices((1, 2, 3), k=40)))


def switched(
    rank: int, world_size: int, *, config: RunConfig, batches: Batches
) -> tuple[RankRun, int]:
    """Train; also count how often a pass has handed over to one that was not over.

    Some pairs have turns that are drawn at random, as plans for GPUs have turns by their costs.
    """
    with counted_turns() as turns, patch.object(Graph, "turns", drawn_turns):
        run = train_on_rank(rank, world_size, config=config, batches=batches)
    return run, turns()


def same(one: Pieces, other: Pieces) -> bool:
    """Whether two runs of a rank left the same bits of the same boxes of the same tensors."""
    if one.keys() != other.keys():
        return False
    pairs = [pair for name in one for pair in zip(one[name][1], other[name][1], strict=True)]
    return all(box == its_box and torch.equal(a, b) for (box, a), (its_box, b) in pairs)
