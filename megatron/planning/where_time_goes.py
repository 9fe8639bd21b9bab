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
from megatron.schedules.costs import Costs
from megatron.schedules.needs import HOST_KINDS, REPLICA_KINDS, STAGE_KINDS
from megatron.schedules.passes import PASS_KINDS, Pass
from megatron.schedules.plan import Plan, plan_of_one
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
    plan, parallel = found.run_plan.plan, found.config.parallel
    counts = count_ranks(found.config, plan_of_one(plan), found.run_plan.layers)
    spent = ByReason(cluster_of(parallel, found.gpu))
    prices = {reason: Only(spent, reason) for reason in WORK_REASONS}
    costs = {
        reason: costs_of(counts, plan, price, crossing_of(parallel))
        for reason, price in prices.items()
    }
    total, waits = dict.fromkeys(REASONS, 0.0), Waits(found.timeline)
    for rank in range(plan.ranks):
        own = _passes(found.timeline, plan, costs, rank)
        for reason, seconds in waits.of(rank):
            own[reason] += seconds
        own["idle"] += found.timeline.end - sum(own.values())
        for reason, seconds in own.items():
            total[reason] += seconds / plan.ranks
    for reason, price in prices.items():
        total[reason] += time_once(counts, price)
    updates = max(found.exchanges.update, default=0.0) if found.exchanges else found.outcome.step
    total["optimizer's step"] += min(updates, found.outcome.step)
    total["replicas"] += max(0.0, found.outcome.step - updates)
    return total


def _passes(
    timeline: Timeline, plan: Plan, costs: Mapping[WorkReason, Costs], rank: int
) -> Seconds:
    """Return the seconds of a rank's passes by reason."""
    total: Seconds = defaultdict(float)
    priced: dict[Pass, Mapping[WorkReason, float]] = {}
    pairs: dict[frozenset[str], list[Span]] = {}
    for span in timeline.compute(rank):
        if span.beside:
            pairs.setdefault(frozenset((span.label, span.beside)), []).append(span)
        else:
            _add_passes(total, [span], [_priced(span, plan, costs, rank, priced)])
    for spans in pairs.values():
        _add_passes(total, spans, [_priced(span, plan, costs, rank, priced) for span in spans])
    return total


def _priced(
    span: Span,
    plan: Plan,
    costs: Mapping[WorkReason, Costs],
    rank: int,
    known: dict[Pass, Mapping[WorkReason, float]],
) -> Mapping[WorkReason, float]:
    """Return the seconds of a pass that runs alone, by reason; those of U are not known."""
    kind = next(kind for kind in PASS_KINDS if kind == span.kind)
    if kind == "U":
        return {}
    item = Pass(kind, 0, span.chunk, span.slice)
    if item not in known:
        known[item] = {why: own.of_pass(plan, rank, item) for why, own in costs.items()}
    return known[item]


def _add_passes(
    total: Seconds, spans: Sequence[Span], priced: Sequence[Mapping[WorkReason, float]]
) -> None:
    """Add the seconds of a pass, or of a pair of passes, as long as it lasts.

    A pass lasts longer than alone while a collective takes multiprocessors from it. A pair takes
    less time than its passes alone: it hides exchanges of tokens.
    """
    lasts = sum(span.length for span in spans)
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
