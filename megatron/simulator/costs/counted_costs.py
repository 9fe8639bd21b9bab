"""Costs of the passes and communications of a plan, from the counts of its ranks.

A count lists what a pass of one rank launches, sends and keeps (``count.py``).
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Final, Protocol

from megatron.schedules.costs import Costs, HopTime, Time
from megatron.schedules.needs import CommKind
from megatron.schedules.passes import CHUNKED_KINDS, PASS_KINDS, PassKind
from megatron.schedules.plan import Plan
from megatron.simulator.costs.count import (
    NO_PASS,
    Begin,
    Collective,
    CountedAxis,
    Launch,
    PassCount,
    RankCount,
    Step,
    Work,
)
from megatron.simulator.costs.in_a_row import in_a_row, leading_begins
from megatron.simulator.costs.turns import REDUCTIONS, turns_of

FLOPS_PER_BYTE: Final = 100
"""FLOPs that stand for moving one byte where the machine is not known. Real devices do about a
hundred operations in the time of a byte."""

OF_EXPERTS: Final = ("experts", "expert_tensor")
"""The axes on which tokens travel to experts."""

Crossing = frozenset[tuple[int, int]]
"""Pairs of pipeline ranks, ascending, whose messages leave a machine."""


class Price(Protocol):
    """Turns counts into times, in any one unit."""

    @property
    def products_alone(self) -> bool:
        """Whether a work without products is free in a pass that has products."""
        ...

    def seconds(self, work: Work) -> float:
        """Return the time of a work."""
        ...

    def message(self, size: float, *, crossing: bool) -> float:
        """Return the time of a message of ``size`` bytes from stage to stage."""
        ...

    def copy(self, size: float) -> float:
        """Return the time of a copy of ``size`` bytes between a rank and its host."""
        ...

    def crowding(self, axis: CountedAxis, ranks: int) -> float:
        """Return the share by which a collective of an axis slows passes that run meanwhile."""
        ...


class Flops:
    """The price for an unknown machine: FLOPs; communication is free.

    In a pass with products only the works with products count. The price does not depend on
    hardware, so all ranks find the same price.
    """

    products_alone: Final = True

    def seconds(self, work: Work) -> float:
        """Return the FLOPs of a work; if it has no products, ``FLOPS_PER_BYTE`` times its bytes.

        A work with communications and without products costs 0.
        """
        if flops := work.flops:
            return float(flops)
        if any(isinstance(step, Begin | Collective) for step in work.steps):
            return 0.0
        return float(FLOPS_PER_BYTE * sum(launch.bytes for launch in work.launches))

    def message(self, size: float, *, crossing: bool) -> float:
        """Return 0."""
        return 0.0

    def copy(self, size: float) -> float:
        """Return 0."""
        return 0.0

    def crowding(self, axis: CountedAxis, ranks: int) -> float:
        """Return 0."""
        return 0.0


BY_FLOPS: Final = Flops()


def costs_of(
    counts: Sequence[RankCount],
    plan: Plan,
    price: Price,
    crossing: Crossing = frozenset(),
    hidden: Collection[str] = OF_EXPERTS,
) -> Costs:
    """Return the costs of a plan.

    Args:
        counts: the count of every pipeline rank.
        plan: any plan with the passes and stages of the plan that was counted.
        price: turns counts into times.
        crossing: pairs of pipeline ranks that are in different machines.
        hidden: the axes at whose collectives the other pass of a pair works; none: pairs are not
            priced.

    Returns:
        The costs of a microbatch, and those of its slices if they were counted.
    """
    seconds = _remembered(price)
    begun = _vocabulary_communications(counts)
    comms: dict[CommKind, HopTime] = {kind: max(map(seconds, each)) for kind, each in begun.items()}
    passes: dict[PassKind, Time] = {}
    waits: dict[PassKind, Time] = {}
    journeys: dict[PassKind, Time] = {}
    for kind in PASS_KINDS:
        if any(known == kind for known, _ in counts[0].passes):
            passes[kind] = _table(counts, kind, plan, seconds)
            if kind in CHUNKED_KINDS and _exchanges(counts, kind, hidden):
                waits[kind] = _table(counts, kind, plan, partial(_wait, price, seconds, hidden))
            if kind in CHUNKED_KINDS and _switches(counts, kind, hidden):
                journeys[kind] = _table(counts, kind, plan, partial(_journeys, hidden))
            if kind == "W" and not set(hidden) <= set(OF_EXPERTS):
                journeys[kind] = _table(counts, kind, plan, partial(_pieces, hidden))
                waits[kind] = _table(counts, kind, plan, partial(_exposed, price, seconds))
    for message in _MESSAGES:
        hops = _hops(counts, plan, message, price, crossing)
        comms[message] = hops if len(set(hops)) > 1 else (hops or [0.0])[0]
    if any(count.moved for count in counts):
        copies = [price.copy(counts[rank].moved.get(chunk, 0)) for rank, chunk in plan.stages]
        comms["O"] = comms["L"] = copies
    slices = zip(*(count.slices for count in counts), strict=True)
    own = tuple(costs_of(each, plan, price, crossing, hidden) for each in slices)
    turns = turns_of(counts, list(journeys), plan.chunks, price, hidden)
    return Costs(passes, comms, waits=waits, journeys=journeys, turns=turns, slices=own)


def _exchange(work: Work, hidden: Collection[str]) -> tuple[Collective, ...]:
    """Return the collectives of a work on axes whose collectives pairs hide."""
    steps = (step for step in work.steps if isinstance(step, Collective))
    return tuple(step for step in steps if step.axis in hidden)


def _exchanges(counts: Sequence[RankCount], kind: PassKind, hidden: Collection[str]) -> bool:
    own = _passes(counts, kind)
    return any(_exchange(work, hidden) for pass_ in own for work, _ in pass_.parts)


def _switches(counts: Sequence[RankCount], kind: PassKind, hidden: Collection[str]) -> bool:
    """Return whether a pass of a kind switches to the other one of its pair, waiting or not.

    A B without sequence parallelism waits for no collective, but switches at its reductions.
    """
    return any(_journeys(hidden, pass_) for pass_ in _passes(counts, kind))


def _passes(counts: Sequence[RankCount], kind: PassKind) -> Iterator[PassCount]:
    return (
        pass_ for count in counts for (known, _), pass_ in count.passes.items() if known == kind
    )


def _wait(
    price: Price, seconds: Callable[[PassCount], float], hidden: Collection[str], count: PassCount
) -> float:
    """Return the time in which a pass waits for collectives that pairs hide; a part of its time."""
    alone = sum(times * price.seconds(Work(_exchange(work, hidden))) for work, times in count.parts)
    return min(alone, seconds(count))


def _exposed(price: Price, seconds: Callable[[PassCount], float], count: PassCount) -> float:
    """Return by how much a pass takes longer than its kernels do without communications."""
    kernels = sum(times * price.seconds(Work(tuple(work.launches))) for work, times in count.parts)
    return max(0.0, seconds(count) - kernels)


def _pieces(hidden: Collection[str], count: PassCount) -> float:
    """Return how often a W lets another pass work: at its collectives, or after each product."""
    products = sum(
        times * sum(bool(launch.flops) for launch in work.launches) for work, times in count.parts
    )
    return max(_journeys(hidden, count), float(products))


def _journeys(hidden: Collection[str], count: PassCount) -> float:
    """Return how often a pass switches to the other one of its pair.

    It does so at collectives that it waits for, and at reductions, which it would else begin on a
    lane. Without a product between, several are one.
    """
    found = 0
    for work, times in count.parts:
        computes = True
        for step in work.steps:
            if any(own.axis in hidden for own in _switches_at(step)):
                found, computes = found + times * computes, False
            elif isinstance(step, Launch) and step.flops:
                computes = True
    return float(found)


def _switches_at(step: Step) -> tuple[Collective, ...]:
    """Return the collectives of a step at which a pass of a pair switches."""
    if isinstance(step, Begin):
        return tuple(own for own in step.collectives if own.kind in REDUCTIONS)
    return (step,) if isinstance(step, Collective) else ()


def time_once(counts: Sequence[RankCount], price: Price) -> float:
    """Return the time of the work ``RankCount.once`` of all ranks.

    Each rank does this work in the F of the first microbatch of an iteration. The ranks do it one
    after the other, because each begins when the microbatch arrives. So the times add up.
    """
    return sum(map(_remembered(price), (count.once for count in counts)))


_MESSAGES: Final[tuple[CommKind, ...]] = ("X", "G")


def _remembered(price: Price) -> Callable[[PassCount], float]:
    """Return a function that prices a pass, and that computes the price of each work only once."""
    known: dict[int, float] = {}
    rows: dict[tuple[tuple[int, int], ...], float] = {}

    def total(count: PassCount) -> float:
        parts = count.parts
        if price.products_alone and count.flops:
            parts = tuple((work, times) for work, times in parts if work.flops)
        elif any(leading_begins(work.steps) for work, _ in parts):
            key = tuple((id(work), times) for work, times in parts)
            if key not in rows:
                rows[key] = _in_a_row(parts, price)
            return rows[key]
        for work, _ in parts:
            if id(work) not in known:
                known[id(work)] = price.seconds(work)
        return sum(times * known[id(work)] for work, times in parts)

    return total


_MOST_ALIKE: Final = 3
"""Equal works in a row of which each further one adds as much time as the one before."""


def _in_a_row(parts: Sequence[tuple[Work, int]], price: Price) -> float:
    """Return the time of works whose communications begin during the work before."""
    few = [work for work, times in parts for _ in range(min(times, _MOST_ALIKE))]
    total = price.seconds(in_a_row(few))
    for work, times in parts:
        if times > _MOST_ALIKE:
            more, less = (price.seconds(in_a_row([work] * (_MOST_ALIKE - left))) for left in (0, 1))
            total += (times - _MOST_ALIKE) * (more - less)
    return total


def _vocabulary_communications(
    counts: Sequence[RankCount],
) -> Mapping[CommKind, list[PassCount]]:
    """Return the collectives of the vocabulary of every rank, by kind."""
    found: dict[CommKind, list[PassCount]] = {}
    for count in counts:
        for (kind, _), own in count.begun.items():
            if kind not in _MESSAGES:
                found.setdefault(kind, []).append(own)
    return found


def _table(
    counts: Sequence[RankCount],
    kind: PassKind,
    plan: Plan,
    seconds: Callable[[PassCount], float],
) -> Time:
    """Return the times of a kind of pass: by rank and chunk if it has chunks, otherwise by rank."""
    chunks = plan.chunks if kind in CHUNKED_KINDS else 1
    table = [
        [seconds(count.passes.get((kind, chunk), NO_PASS)) for chunk in range(chunks)]
        for count in counts
    ]
    return table if kind in CHUNKED_KINDS else [times for [times] in table]


def _hops(
    counts: Sequence[RankCount], plan: Plan, kind: CommKind, price: Price, crossing: Crossing
) -> list[float]:
    """Return the time of the message over every hop from stage to stage."""
    found = []
    for before, (one, other) in enumerate(pairwise(rank for rank, _ in plan.stages)):
        sender, stage = (one, before) if kind == "X" else (other, before + 1)
        own = counts[sender].begun.get((kind, stage), NO_PASS)
        size = sum(
            step.bytes
            for work, _ in own.parts
            for step in work.steps
            if isinstance(step, Collective)
        )
        pair = min(one, other), max(one, other)
        found.append(price.message(size, crossing=pair in crossing) if size else 0.0)
    return found
