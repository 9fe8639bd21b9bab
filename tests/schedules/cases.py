"""What the properties are checked on: pipelines of all sizes, blocks of any shape, unequal costs.

Costs are small whole numbers, so that times compare exactly and ties are common.
"""

from functools import cache
from random import Random
from typing import NamedTuple

from hypothesis import assume
from hypothesis import strategies as st

from megatron.schedules.block import Block, Slot
from megatron.schedules.passes import PASS_KINDS, Pass, PassKind
from megatron.schedules.plan import Plan
from megatron.schedules.registry import make_plan

BARRIERS = {"none": 0, "vocab-2": 1, "vocab-1": 2}
vocabularies = st.sampled_from(["none", "vocab-1", "vocab-2"])


class Case(NamedTuple):
    """A plan of 1F1B by its parameters, so that a failing example reads well."""

    vocabulary: str
    ranks: int
    microbatches: int

    @property
    def plan(self) -> Plan:
        return _plan(*self)


@cache
def _plan(vocabulary: str, ranks: int, microbatches: int) -> Plan:
    return make_plan("1f1b", vocabulary, ranks, microbatches)


@st.composite
def cases(
    draw: st.DrawFn, ranks: int = 16, vocabulary: st.SearchStrategy[str] = vocabularies
) -> Case:
    """Draw a 1F1B of up to ``ranks`` ranks and four microbatches per rank."""
    p = draw(st.integers(1, ranks))
    return Case(draw(vocabulary), p, draw(st.integers(1, 4 * p)))


class RandomCosts:
    """A duration of 1 to 9 for every kind of pass on every rank, drawn from ``seed``."""

    def __init__(self, seed: int, ranks: int) -> None:
        random = Random(seed)
        self.passes: dict[PassKind, list[float]] = {
            kind: [float(random.randint(1, 9)) for _ in range(ranks)] for kind in PASS_KINDS
        }

    def __call__(self, rank: int, item: Pass) -> float:
        return self.passes[item.kind][rank]


seeds = st.integers(0, 999)


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
