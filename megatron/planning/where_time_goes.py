"""The seconds of an iteration by their reasons, on average over the ranks.

The seconds of a pass are those of its launches and collectives, by kind and by axis. A wait of a
rank for a communication is for that communication as long as one of its kind is under way there,
and idle before, because other ranks still have work to do.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Final, Literal

from megatron.planning.count.run import count_ranks
from megatron.planning.forecast_run import RunForecast
from megatron.planning.run_costs import cluster_of, crossing_of
from megatron.schedules.needs import HOST_KINDS, REPLICA_KINDS, STAGE_KINDS
from megatron.schedules.passes import PASS_KINDS, Pass
from megatron.schedules.plan import plan_of_one
from megatron.simulator.costs.counted_costs import costs_of, time_once
from megatron.simulator.costs.reasons import WORK_REASONS, ByReason, Only, WorkReason
from megatron.simulator.simulate import Span, Timeline

Reason = (
    WorkReason | Literal["replicas", "transfers", "host", "crowding", "idle", "optimizer's step"]
)
"""The reasons: those of passes; waiting for collectives of replicas, for transfers between stages,
and for copies to and from the host; passes that are slower while a collective is under way; waiting
for work of other ranks; the optimizer's step."""

REASONS: Final[tuple[Reason, ...]] = (
    *WORK_REASONS,
    *("replicas", "transfers", "host", "crowding", "idle", "optimizer's step"),
)

Seconds = dict[Reason, float]


def where_time_goes(found: RunForecast) -> Mapping[Reason, float]:
    """Return the seconds of an iteration by reason, a mean over the ranks; reasons of 0 s too.

    They add up to ``found.outcome.seconds``. What recomputation repeats counts with its kernels.
    """
    plan, passes = found.run_plan.plan, PassSeconds(found)
    total, waits = dict.fromkeys(REASONS, 0.0), Waits(found.timeline)
    for rank in range(plan.ranks):
        own: Seconds = defaultdict(float)
        for spans in items_of(found.timeline, rank):
            priced = [passes.of(span) for span in spans]
            _add_passes(own, spans, priced, passes.crowding(spans))
        for reason, seconds in waits.of(rank):
            own[reason] += seconds
        own["idle"] += found.timeline.end - sum(own.values())
        for reason, seconds in own.items():
            total[reason] += seconds / plan.ranks
    for work_reason, seconds in passes.once().items():
        total[work_reason] += seconds
    updates = max(found.exchanges.update, default=0.0) if found.exchanges else found.outcome.step
    total["optimizer's step"] += min(updates, found.outcome.step)
    total["replicas"] += max(0.0, found.outcome.step - updates)
    return total


def items_of(timeline: Timeline, rank: int) -> Iterator[Sequence[Span]]:
    """Yield the passes of a rank: each one that runs alone, and both of a pair together."""
    pairs: dict[frozenset[str], list[Span]] = {}
    for span in timeline.compute(rank):
        if span.beside:
            pairs.setdefault(frozenset((span.label, span.beside)), []).append(span)
        else:
            yield [span]
    yield from pairs.values()


class PassSeconds:
    """The seconds that passes take if they run alone, by reason.

    Args:
        found: the forecast of a run with these passes.
    """

    def __init__(self, found: RunForecast) -> None:
        self._plan, self._alone = found.run_plan.plan, found.alone
        parallel = found.config.parallel
        self._counts = count_ranks(found.config, plan_of_one(self._plan), found.run_plan.layers)
        spent = ByReason(cluster_of(parallel, found.gpu))
        self._prices = {reason: Only(spent, reason) for reason in WORK_REASONS}
        self._costs = {
            reason: costs_of(self._counts, self._plan, price, crossing_of(parallel), hidden=())
            for reason, price in self._prices.items()
        }
        self._known: dict[tuple[int, Pass], Mapping[WorkReason, float]] = {}

    def of(self, span: Span) -> Mapping[WorkReason, float]:
        """Return the seconds of a pass; those of U are not known."""
        item = self._pass(span)
        if item.kind == "U":
            return {}
        key = span.rank, item
        if key not in self._known:
            self._known[key] = {
                why: own.of_pass(self._plan, *key) for why, own in self._costs.items()
            }
        return self._known[key]

    def crowding(self, spans: Sequence[Span]) -> float:
        """Return by how many seconds a pair is slower because of its own collectives."""
        if len(spans) == 1:
            return 0.0
        one, other = (self._pass(span) for span in spans)
        times = (
            self._alone.of_pair(self._plan, spans[0].rank, (one, other), crowds=crowds)
            for crowds in (True, False)
        )
        crowded, free = times
        return sum(span.length for span in spans) * (1 - free / crowded) if crowded else 0.0

    def _pass(self, span: Span) -> Pass:
        kind = next(kind for kind in PASS_KINDS if kind == span.kind)
        return Pass(kind, 0, span.chunk, span.slice)

    def once(self) -> Mapping[WorkReason, float]:
        """Return the seconds of work that an iteration has once, beside its passes."""
        return {why: time_once(self._counts, price) for why, price in self._prices.items()}


def _add_passes(
    total: Seconds,
    spans: Sequence[Span],
    priced: Sequence[Mapping[WorkReason, float]],
    crowding: float,
) -> None:
    """Add the seconds of a pass, or of a pair of passes, as long as it lasts.

    A pass lasts longer than alone while a collective takes multiprocessors from it, and so does a
    pair: by ``crowding`` if this is a collective of the pair. Else a pair takes less time than its
    passes alone: it hides collectives of its passes.
    """
    lasts = sum(span.length for span in spans) - crowding
    total["crowding"] += crowding
    if spans[0].kind == "U":
        total["optimizer's step"] += lasts
        return
    for own in priced:
        for reason, seconds in own.items():
            total[reason] += seconds
    more = lasts - sum(sum(own.values()) for own in priced)
    total["crowding"] += max(0.0, more)
    for reason in _HIDDEN:
        hides = min(max(0.0, -more), sum(own[reason] for own in priced))
        total[reason] -= hides
        more += hides


_HIDDEN: Final[tuple[WorkReason, ...]] = ("experts", "tensor", "context", "vocabulary")
"""The waits that a pair of passes may hide, in the order in which less time is laid to them."""


def _reason_of(kind: str) -> Reason:
    """Return the reason of a wait for a communication of a kind."""
    if kind in REPLICA_KINDS:
        return "replicas"
    if kind in STAGE_KINDS:
        return "transfers"
    return "host" if kind in HOST_KINDS else "vocabulary"


class Waits:
    """What the ranks wait for.

    Args:
        timeline: timeline of the schedule.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._waits: dict[int, list[Span]] = defaultdict(list)
        for wait in timeline.waits:
            self._waits[wait.rank].append(wait)
        spans: dict[tuple[int, Reason], list[tuple[float, float]]] = defaultdict(list)
        for span in timeline.spans:
            if span.lane == "comm":
                spans[span.rank, _reason_of(span.kind)].append((span.start, span.end))
        self._under_way = {key: _merged(sorted(parts)) for key, parts in spans.items()}

    def of(self, rank: int) -> Iterator[tuple[Reason, float]]:
        """Yield the parts of a rank's waits in which a communication of the kind is under way."""
        for wait in self._waits[rank]:
            reason = _reason_of(wait.kind)
            parts = self._under_way.get((rank, reason), ())
            yield reason, _common(parts, wait.start, wait.end)


def _merged(parts: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the same times without overlap, in order."""
    found: list[tuple[float, float]] = []
    for start, end in parts:
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def _common(parts: Sequence[tuple[float, float]], start: float, end: float) -> float:
    """Return how much of the time from ``start`` to ``end`` lies in ordered parts."""
    first = bisect_left(parts, start, key=lambda part: part[1])
    total = 0.0
    for begin, until in islice(parts, first, None):
        if begin >= end:
            break
        total += min(until, end) - max(begin, start)
    return total
