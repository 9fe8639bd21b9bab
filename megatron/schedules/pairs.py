"""Join two passes that stand near each other into a pair, so that each hides the other's waits.

A layer that ranks share waits for collectives: tokens travel to experts, or tensor-parallel ranks
gather and sum activations. In a pass that runs alone, the rank idles meanwhile. In a pair, each
pass works while the other one waits: F with B (DualPipe, arXiv 2412.19437, section 3.2.1; with
collectives of tensor-parallel ranks, arXiv 2510.27257), F or B with a W of another microbatch, or
with a vocabulary pass. So a pair takes less time than its passes (``Costs.of_pair``). But a pair
starts only when the needs of both passes are met, and other passes get the results of both only
when the pair ends. A plan whose neighbours wait for each result at once would become longer, so
``joined`` takes only pairs that do not lengthen the plan.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final, NamedTuple

from megatron.schedules.costs import UNIT_COSTS, Costs
from megatron.schedules.graph import Graph
from megatron.schedules.held import peak_held
from megatron.schedules.passes import PARTNERS, Pass, PassKind
from megatron.schedules.plan import Plan
from megatron.schedules.timing import Deadline, Walk, walk

MOST_BETWEEN: Final = 3
"""The most other passes that may stand between an F and a B, and make way for their pair."""

MOST_BEFORE_W: Final = 1
"""The most other passes that may stand between a W and the F or B that it is joined with."""

_ROUNDING: Final = 1e-9
"""Share of a plan's time by which it may become longer through rounding."""

_F_WITH_B: Final = ("F", "B")


class _Kind(NamedTuple):
    """How two passes stand in a row; pairs of one kind are joined together.

    One pass keeps its place, and the other one comes to it: an F to a B, any other pass to an F or
    a B.

    Attributes:
        keeper_first: whether the pass that keeps its place stands before the other one.
        first: chunk of the first pass of the pair.
        second: chunk of the second one.
        between: number of other passes between the two.
        kinds: of the two passes, in the order of the pair.
    """

    keeper_first: bool
    first: int
    second: int
    between: int
    kinds: tuple[PassKind, PassKind]


class _Place(NamedTuple):
    """A place in a row where two passes may be joined: from ``begin`` to before ``end``."""

    begin: int
    end: int
    kind: _Kind


def joined(plan: Plan, costs: Costs = UNIT_COSTS, *, joins_all: bool = False) -> Plan:
    """Return ``plan`` with all pairs that do not make it longer.

    Pairs of one kind (which passes and chunks, which stands first, how many passes between the two)
    are joined on all ranks. Kinds of F and B come first, then those with the fewest passes between,
    and among these the most frequent one. A kind is kept if the plan then ends no later and no rank
    holds more. Within a kind, a pair whose ranks would wait for each other in a circle is left out.
    An F comes to the B that it is joined with, and any other pass to its F or B. Passes that stand
    between the two go before the pair, or after it, and so to the other side of the pass that
    comes.

    Args:
        plan: a checked plan; its pairs stay.
        costs: durations, with the waits that pairs hide.
        joins_all: whether to join all neighbours that save time together, and not F and B alone.
    """
    if plan.forward_only or plan.pairs:
        return plan
    graph = Graph(plan, costs)
    rows = graph.rows(plan)
    places = [sorted(own) for own in _all_places(plan, graph, rows, joins_all=joins_all)]
    counts = Counter(place.kind for own in places for place in own)
    best, end, held = plan, walk(graph, rows).end, _held(plan)
    passes = [dict(zip(*own, strict=True)) for own in zip(rows, plan.rows, strict=True)]
    kept: set[_Kind] = set()

    def order(kind: _Kind) -> tuple[object, ...]:
        return kind.kinds != _F_WITH_B, kind.between, -counts[kind], kind

    for kind in sorted(counts, key=order):
        limit = end * (1 + _ROUNDING)
        tried = _with_pairs(graph, rows, places, {*kept, kind}, limit * (1 + _ROUNDING))
        if tried is None or tried.end > limit:
            continue
        made = tried.plan(plan, passes)
        if all(
            level <= most
            for now, before in zip(_held(made), held, strict=True)
            for level, most in zip(now, before, strict=True)
        ):
            # The least end so far: what rounding allows must not add up over kinds.
            best, end = made, min(end, tried.end)
            kept.add(kind)
    return best


def _held(plan: Plan) -> list[tuple[float, ...]]:
    return [tuple(peak_held(plan, row)) for row in plan.rows]


def _all_places(
    plan: Plan, graph: Graph, rows: Sequence[Sequence[int]], *, joins_all: bool
) -> Iterator[list[_Place]]:
    """Yield for every rank the places where two of its passes may be joined."""
    m = graph.microbatches
    for row, numbers in zip(plan.rows, rows, strict=True):
        found = [*_places(row)]
        for place in _other_places(plan, row) if joins_all else ():
            one, other = numbers[place.begin] // m, numbers[place.end - 1] // m
            apart = graph.times[one] + graph.times[other]
            if graph.pair_time(one, other) < apart * (1 - _ROUNDING):
                found.append(place)
        yield found


def _other_places(plan: Plan, row: Sequence[Pass]) -> Iterator[_Place]:
    """Yield the places where an F or a B may be joined with a pass other than these.

    Nobody waits for a W, so that a W may come from farther away, but not from before its own B.
    """
    for begin, first in enumerate(row):
        for end in range(begin + 1, min(begin + 2 + MOST_BEFORE_W, len(row))):
            between, second = row[begin + 1 : end], row[end]
            keeps, comes = (first, second) if first.kind in PARTNERS else (second, first)
            if comes.kind in ("F", "B") or comes.kind not in PARTNERS.get(keeps.kind, ()):
                continue
            if between and (comes.kind != "W" or comes._replace(kind="B") in between):
                continue
            if _may_be_joined(plan, keeps, comes):
                kinds = keeps.kind, comes.kind
                kind = _Kind(keeps is first, keeps.chunk, comes.chunk, len(between), kinds)
                yield _Place(begin, end + 1, kind)


def _may_be_joined(plan: Plan, keeps: Pass, comes: Pass) -> bool:
    """Return whether neither pass needs the other, as far as the two alone tell."""
    if plan.treatment.synchronous and comes.kind in ("S", "T"):
        return False
    if keeps.microbatch != comes.microbatch:
        return True
    return keeps.kind == "B" and comes.kind in ("W", "T") and keeps._replace(kind="W") != comes


def _places(row: Sequence[Pass]) -> Iterator[_Place]:
    """Yield the places where an F and a B of a row may be joined; places may overlap.

    A B needs every F of its own microbatch, some of them through other ranks. Passes of different
    microbatches need nothing of each other.
    """
    ends = [at for at, item in enumerate(row) if item.kind in ("F", "B")]
    for begin, end in pairwise(ends):
        first, second, between = row[begin], row[end], row[begin + 1 : end]
        if first.kind == second.kind or first.microbatch == second.microbatch:
            continue
        forward, backward = (first, second) if first.kind == "F" else (second, first)
        if len(between) <= MOST_BETWEEN and all(
            item.microbatch != forward.microbatch for item in between
        ):
            chunks = forward.chunk, backward.chunk
            kind = _Kind(second.kind == "F", *chunks, len(between), _F_WITH_B)
            yield _Place(begin, end + 1, kind)


class _Tried(NamedTuple):
    """A plan with some pairs, as numbers of a graph.

    Attributes:
        rows: for every rank its passes.
        pairs: for every rank the first pass of each of its pairs.
        end: end of the last pass.
    """

    rows: Sequence[Sequence[int]]
    pairs: Sequence[Collection[int]]
    end: float

    def plan(self, plan: Plan, passes: Sequence[Mapping[int, Pass]]) -> Plan:
        """Return ``plan`` with these rows and pairs; ``passes`` are those of its own rows."""
        rows = tuple(
            tuple(map(known.__getitem__, row)) for known, row in zip(passes, self.rows, strict=True)
        )
        firsts = (
            (rank, known[item])
            for rank, (known, own) in enumerate(zip(passes, self.pairs, strict=True))
            for item in own
        )
        return replace(plan, rows=rows, pairs=frozenset(firsts))


def _with_pairs(
    graph: Graph,
    original: Sequence[Sequence[int]],
    places: Sequence[Sequence[_Place]],
    kinds: Collection[_Kind],
    limit: float,
) -> _Tried | None:
    """Return a plan with all pairs of some kinds, except pairs with which the plan would hang.

    The plan is walked. Where no rank can go on, one of them stands at a pair and could go on
    without it, because the plan runs without pairs. This pair is taken apart. The walk ends with
    ``None`` as soon as the plan is known to end after ``limit``.
    """
    m, times = graph.microbatches, graph.times
    rows, pairs = [list(row) for row in original], [set[int]() for _ in original]
    own_places = [dict[int, _Place]() for _ in original]
    work = [sum(times[item // m] for item in row) for row in original]
    for rank, own in enumerate(places):
        for place in _apart_from_each_other(own, kinds):
            own_places[rank].update(dict.fromkeys(range(place.begin, place.end), place))
            rows[rank][place.begin : place.end] = _together(rows[rank], place)
            at = _first_at(place)
            one, other = (item // m for item in rows[rank][at : at + 2])
            work[rank] -= times[one] + times[other] - graph.pair_time(one, other)
            pairs[rank].add(rows[rank][at])
    run = Walk(graph, rows, pairs, Deadline(limit, work))
    awake = list(range(len(rows)))
    while awake:
        while awake:
            awake.extend(run.advance(awake.pop()))
            if run.is_late:
                return None
        for rank, at in sorted(run.stuck.items()):
            here = own_places[rank].get(at)
            if here is None or _first(rows[rank], here) not in pairs[rank]:
                continue
            done = {*rows[rank][here.begin : at]}
            rest = [n for n in original[rank][here.begin : here.end] if n not in done]
            if run.can_run(rank, rest[0]):
                pairs[rank].remove(_first(rows[rank], here))
                rows[rank][at : here.end] = rest
                awake.append(rank)
                break
    assert not run.stuck, "joined takes checked plans"
    return _Tried(rows, pairs, run.end)


def _apart_from_each_other(places: Sequence[_Place], kinds: Collection[_Kind]) -> Iterator[_Place]:
    """Yield the places of some kinds from left to right, each after the end of the one before."""
    free = 0
    for place in places:
        if place.kind in kinds and place.begin >= free:
            yield place
            free = place.end


def _together(row: Sequence[int], place: _Place) -> list[int]:
    """Return the passes of a place in their new order, with the two side by side."""
    one, *between, other = row[place.begin : place.end]
    kind = place.kind
    pair = [one, other] if kind.keeper_first == (kind.kinds != _F_WITH_B) else [other, one]
    return [*pair, *between] if kind.keeper_first else [*between, *pair]


def _first(row: Sequence[int], place: _Place) -> int:
    """Return the first pass of a pair, in a place whose passes are in their new order."""
    return row[_first_at(place)]


def _first_at(place: _Place) -> int:
    """Return the index of a pair's first pass, in a row where the place has its new order."""
    return place.begin if place.kind.keeper_first else place.end - 2
