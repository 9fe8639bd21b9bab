"""What the properties are checked on: pipelines of all sizes, blocks of any shape, unequal costs.

Costs are small whole numbers, so that times compare exactly and ties are common.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from random import Random
from typing import Final, NamedTuple

import pytest
from hypothesis import assume
from hypothesis import strategies as st

from megatron.schedules.block_options import BlockOptions
from megatron.schedules.blocks.block import Block, Slot, unroll
from megatron.schedules.blocks.with_vocabulary import with_vocabulary
from megatron.schedules.catalogue import SCHEDULES, TRAITS, Schedule
from megatron.schedules.costs import UNIT_COSTS, Costs
from megatron.schedules.graph import Graph
from megatron.schedules.held import held_changes, peak_held
from megatron.schedules.make_plan import make_plan
from megatron.schedules.needs import COMM_KINDS
from megatron.schedules.passes import CHUNKED_KINDS, PASS_KINDS, Pass, PassKind
from megatron.schedules.plan import Plan, passes_of
from megatron.schedules.search import shorten
from megatron.schedules.search.list_schedule import Problem, Rows
from megatron.schedules.treatments import TREATMENTS, Treatment

BARRIERS: Final = {name: len(known.barriers) for name, known in TREATMENTS.items()}
"""Barriers of every treatment, each of which keeps one microbatch more in flight."""
PIPELINED: Final = tuple(
    name for name, known in TREATMENTS.items() if known.in_plan == known and not known.synchronous
)
"""The treatments that make plans of different kinds, the synchronous one left out."""
NAMES: Final = (*SCHEDULES, "zb-auto")
DRAWN: Final = tuple(name for name, known in SCHEDULES.items() if not known.searched)
"""The schedules that are their block."""
V_SHAPED: Final = tuple(
    name for name in DRAWN if SCHEDULES[name].block(3, 3, 2).stages[3:4] == ((2, 1),)
)
"""Those that turn at the last rank."""
UNGROUPED: Final = tuple(
    name
    for name, known in SCHEDULES.items()
    if not known.block(2, 2, known.chunks).group and known.promise(2, 9, 2) < 9
)
"""Those that take every microbatch in the same way, however many there are."""
vocabularies = st.sampled_from(PIPELINED)
seeds = st.integers(0, 999)
whole = st.just(1)
"""The number of slices of microbatches that are not cut."""


class Case(NamedTuple):
    """A plan by its parameters, so that a failing example reads well.

    Attributes:
        schedule: a name of ``NAMES``.
        vocabulary: a name of ``BARRIERS``.
        ranks: pipeline ranks.
        microbatches: microbatches of an iteration.
        chunks: model chunks of a rank; 1 for zb-auto.
        seed: of the costs that place the passes; ``None`` for the block's own order.
        ahead: chunks that a rank may hold between R and B; ``None`` without R.
        slices: slices of every microbatch.
        group: microbatches of a group; ``None``: as many as the schedule has by itself.
    """

    schedule: str
    vocabulary: str
    ranks: int
    microbatches: int
    chunks: int
    seed: int | None = None
    ahead: int | None = None
    slices: int = 1
    group: int | None = None

    @property
    def catalogued(self) -> Schedule:
        """The row of the catalogue of a schedule that has a block, with these groups."""
        return SCHEDULES[self.schedule].made_with(self.options.values)

    @property
    def options(self) -> BlockOptions:
        """The options of its block."""
        return BlockOptions.of(group=self.group)

    @property
    def plan(self) -> Plan:
        """The plan, made once."""
        return _plan(self)

    @property
    def treatment(self) -> Treatment:
        """What becomes of the vocabulary layers."""
        return TREATMENTS[self.vocabulary]

    @property
    def barriers(self) -> int:
        """How many more microbatches may be in flight for the vocabulary."""
        return BARRIERS[self.vocabulary]

    @property
    def costs(self) -> Costs:
        """The costs that placed the passes."""
        if self.seed is None:
            return UNIT_COSTS
        return random_costs(self.seed, self.ranks, self.chunks)

    @property
    def memory_limit(self) -> float | None:
        """Microbatches that zb-auto may hold: between what ZB-H1 and ZB-H2 do, with barriers."""
        if self.schedule != "zb-auto":
            return None
        return float(self.ranks + (self.seed or 0) % self.ranks + self.barriers)


@contextmanager
def few_trials() -> Iterator[None]:
    """Let ``shorten`` give up early: what holds for every trial needs no long search."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shorten, "PATIENCE", 4)
        yield


@cache
def _plan(case: Case) -> Plan:
    with few_trials():
        return make_plan(
            case.schedule,
            case.vocabulary,
            case.ranks,
            case.microbatches,
            case.costs,
            chunks=case.chunks if TRAITS[case.schedule].takes_chunks else None,
            memory_limit=case.memory_limit,
            recompute_ahead=case.ahead,
            shortened=case.seed is not None,
            slices=case.slices,
            options=case.options,
        )


@st.composite
def cases(
    draw: st.DrawFn,
    schedules: Sequence[str] = NAMES,
    vocabulary: st.SearchStrategy[str] = vocabularies,
    passes: int = 400,
    shortened: bool = False,
    slices: st.SearchStrategy[int] = whole,
) -> Case:
    """Draw a plan of 1 to 32 ranks, mostly few, and of up to four microbatches a rank.

    Args:
        draw: given by hypothesis.
        schedules: names to draw from.
        vocabulary: treatments to draw from.
        passes: bound of ranks x microbatches x chunks, which is what a plan costs.
        shortened: draw costs too, and have the plan shortened by them.
        slices: slices of every microbatch to draw from.
    """
    number = draw(slices)
    passes = max(passes // number, 1)
    schedule = draw(st.sampled_from(schedules))
    known = TRAITS[schedule]
    chunks = known.chunks + known.chunk_step * draw(st.integers(0, 2 if known.takes_chunks else 0))
    if schedule == "zb-auto" and not shortened:  # it has no plan without a search
        shortened, passes = True, min(passes, 40)
    ranks = draw(st.integers(1, 7) | st.integers(8, 32))
    ranks = max(min(ranks, passes // chunks), 1)
    microbatches = draw(st.integers(1, max(1, min(4 * ranks, passes // (chunks * ranks)))))
    seed = draw(seeds) if shortened else None
    ahead = draw(st.sampled_from([None, None, 1, 2]))
    group = draw(st.none() | st.integers(ranks, 3 * ranks)) if known.block_options else None
    return Case(schedule, draw(vocabulary), ranks, microbatches, chunks, seed, ahead, number, group)


def random_costs(seed: int, ranks: int, chunks: int = 1, unit: float = 1.0) -> Costs:
    """Return 1 to 9 units for every kind of pass on every rank, and chunk if it has any.

    Communication is free: see ``with_comms``.
    """
    random = Random(seed)
    return Costs(
        {
            kind: [
                [unit * random.randint(1, 9) for _ in range(chunks if kind in CHUNKED_KINDS else 1)]
                for _ in range(ranks)
            ]
            for kind in PASS_KINDS
        }
    )


def with_comms(costs: Costs, seed: int, longest: int = 9) -> Costs:
    """Return ``costs`` with communications of every kind that take 0 to ``longest``."""
    random = Random(seed)
    return Costs(costs.passes, {kind: float(random.randint(0, longest)) for kind in COMM_KINDS})


def problem_of(plan: Plan, costs: Costs, kept: float = 1.0) -> Problem:
    """Return the search problem whose ranks may hold what they do in ``plan``."""
    graph = Graph(plan, costs)
    limits = [peak_held(plan, row, kept) for row in plan.rows]
    return Problem(graph, [held_changes(plan, item, kept) for item in graph.passes], limits)


def rows_of(problem: Problem, plan: Plan) -> Rows:
    """Return the numbered rows of ``plan``."""
    return [problem.graph.row(rank, row) for rank, row in enumerate(plan.rows)]


def plan_with(plan: Plan, problem: Problem, rows: Rows) -> Plan:
    """Return ``plan`` with other, numbered rows."""
    return replace(plan, rows=tuple(problem.graph.plan_row(row) for row in rows))


def plan_of_block(block: Block, vocabulary: str, microbatches: int) -> Plan:
    """Return the plan of ``block`` with a treatment of ``PIPELINED``."""
    split = with_vocabulary(block, TREATMENTS[vocabulary]) if BARRIERS[vocabulary] else block
    return unroll(split, microbatches)


@st.composite
def blocks(draw: st.DrawFn) -> Block:
    """Draw any block that holds together, with one or two chunks in any order of stages.

    Every pass starts some time after what it needs, and no two passes of a rank overlap however
    often the block is repeated: that is all that a block promises.
    """
    ranks, chunks = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    places = [(rank, chunk) for rank in range(ranks) for chunk in range(chunks)]
    stages = tuple(draw(st.permutations(places)))
    kinds: tuple[PassKind, ...] = ("F", "B", "W") if draw(st.booleans()) else ("F", "B")
    long = {place: {kind: draw(st.integers(1, 2)) for kind in kinds} for place in places}
    busiest = max(
        sum(sum(long[rank, chunk].values()) for chunk in range(chunks)) for rank in range(ranks)
    )
    interval = busiest + draw(st.integers(0, 3))
    rows: list[list[Slot]] = [[] for _ in range(ranks)]
    taken: list[set[int]] = [set() for _ in range(ranks)]

    def place(at: tuple[int, int], kind: PassKind, ready: int) -> int:
        rank, length = at[0], long[at][kind]
        ready += draw(st.integers(0, 3))
        fits = (
            (start, used)
            for start in range(ready, ready + interval)
            if not (used := {(start + i) % interval for i in range(length)}) & taken[rank]
        )
        start, used = next(fits, (None, set()))
        assume(start is not None)
        assert start is not None
        taken[rank] |= used
        rows[rank].append(Slot(start, length, kind, at[1]))
        return start + length

    now = draw(st.integers(-3, 3))
    for at in stages:
        now = place(at, "F", now)
    for at in reversed(stages):
        now = place(at, "B", now)
        if "W" in kinds:
            place(at, "W", now)
    return Block(tuple(map(tuple, rows)), stages, interval)


plans_of_blocks = st.builds(plan_of_block, blocks(), vocabularies, st.integers(1, 6))


def looking_ahead(plan: Plan, number: int) -> Plan:
    """The plan with a stage that looks ahead: this one, or the last; none if it is negative."""
    return replace(plan, ahead_stage=None if number < 0 else min(number, len(plan.stages) - 1))


def expected_passes(plan: Plan, rank: int) -> set[Pass]:
    """The passes that ``rank`` must run, each exactly once."""
    return {
        Pass(kind, i, chunk, number)
        for kind, _, chunk, number in passes_of(plan, rank)
        for i in range(plan.microbatches)
    }
