"""Join an F and a B that stand near each other into a pair, so that their exchange is hidden.

A layer with experts on other ranks sends tokens to these ranks and waits for the results. In a pass
that runs alone, the rank idles meanwhile. In a pair, the B works while the F waits, and the F while
the B waits (DualPipe, arXiv 2412.19437, section 3.2.1). So a pair takes less time than its passes
(``Costs.of_pair``). But a pair starts only when the needs of both passes are met, and other passes
get the results of both only when the pair ends. A plan whose neighbours wait for each result at
once would become longer, so ``joined`` takes only pairs that do not lengthen the plan.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final, NamedTuple

from megatron.schedules.costs import UNIT_COSTS, Costs
from megatron.schedules.graph import Graph
from megatron.schedules.held import peak_held
from megatron.schedules.passes import Pass
from megatron.schedules.plan import Plan
from megatron.schedules.timing import Walk, walk

MOST_BETWEEN: Final = 3
"""The most other passes that may stand between the two passes of a pair, and make way for it."""

_ROUNDING: Final = 1e-9
"""Share of a plan's time by which it may become longer through rounding."""


class _Kind(NamedTuple):
    """How two passes stand in a row; pairs of one kind are joined together.

    Attributes:
        backward_first: whether the B stands before the F.
        forward: chunk of the F.
        backward: chunk of the B.
        between: number of other passes between the two.
    """

    backward_first: bool
    forward: int
    backward: int
    between: int


class _Place(NamedTuple):
    """A place in a row where two passes may be joined: from ``begin`` to before ``end``."""

    begin: int
    end: int
    kind: _Kind


def joined(plan: Plan, costs: Costs = UNIT_COSTS) -> Plan:
    """Return ``plan`` with all pairs that do not make it longer.

    Pairs of one kind (which chunks, which pass first, how many passes between the two) are joined
    on all ranks. Kinds with the fewest passes between come first, and among these the most frequent
    one. A kind is kept if the plan then ends no later and no rank holds more. Within a kind, a pair
    whose ranks would wait for each other in a circle is left out. In a pair, the F is put first.
    Other passes that stand between the two go before the pair if the F comes first, and after it
    otherwise.

    Args:
        plan: a checked plan; its pairs stay.
        costs: durations, with the waits that pairs hide.
    """
    if plan.forward_only or plan.pairs:
        return plan
    places = [list(_places(row)) for row in plan.rows]
    counts = Counter(place.kind for own in places for place in own)
    graph = Graph(plan, costs)
    rows = graph.rows(plan)
    best, end, held = plan, walk(graph, rows).end, _held(plan)
    kept: set[_Kind] = set()
    for kind in sorted(counts, key=lambda kind: (kind.between, -counts[kind], kind)):
        tried = _with_pairs(graph, rows, places, {*kept, kind})
        if tried.end > end * (1 + _ROUNDING):
            continue
        made = tried.plan(plan, graph)
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
            kind = _Kind(second.kind == "F", forward.chunk, backward.chunk, len(between))
            yield _Place(begin, end + 1, kind)


class _Tried(NamedTuple):
    """A plan with some pairs, as numbers of a graph: its rows, the F of each pair, and its end."""

    rows: Sequence[Sequence[int]]
    pairs: Sequence[Collection[int]]
    end: float

    def plan(self, plan: Plan, graph: Graph) -> Plan:
        """Return the rows as a plan; ``plan`` is the plan without pairs."""
        pairs = (
            (rank, item)
            for rank, own in enumerate(self.pairs)
            for item in graph.plan_row(sorted(own))
        )
        return replace(plan, rows=tuple(map(graph.plan_row, self.rows)), pairs=frozenset(pairs))


def _with_pairs(
    graph: Graph,
    original: Sequence[Sequence[int]],
    places: Sequence[Sequence[_Place]],
    kinds: Collection[_Kind],
) -> _Tried:
    """Return a plan with all pairs of some kinds, except pairs with which the plan would hang.

    The plan is walked. Where no rank can go on, one of them stands at a pair and could go on
    without it, because the plan runs without pairs. This pair is taken apart.
    """
    rows, pairs = [list(row) for row in original], [set[int]() for _ in original]
    own_places = [dict[int, _Place]() for _ in original]
    for rank, own in enumerate(places):
        for place in _apart_from_each_other(own, kinds):
            own_places[rank].update(dict.fromkeys(range(place.begin, place.end), place))
            rows[rank][place.begin : place.end] = _together(rows[rank], place)
            pairs[rank].add(_forward(rows[rank], place))
    run = Walk(graph, rows, pairs)
    awake = list(range(len(rows)))
    while awake:
        while awake:
            awake.extend(run.advance(awake.pop()))
        for rank, at in sorted(run.stuck.items()):
            here = own_places[rank].get(at)
            if here is None or _forward(rows[rank], here) not in pairs[rank]:
                continue
            done = {*rows[rank][here.begin : at]}
            rest = [n for n in original[rank][here.begin : here.end] if n not in done]
            if run.can_run(rank, rest[0]):
                pairs[rank].remove(_forward(rows[rank], here))
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
    """Return the passes of a place in their new order, with the F right before the B."""
    first, *between, second = row[place.begin : place.end]
    return [second, first, *between] if place.kind.backward_first else [*between, first, second]


def _forward(row: Sequence[int], place: _Place) -> int:
    """Return the F of a place whose passes are in their new order."""
    return row[place.begin if place.kind.backward_first else place.end - 2]
