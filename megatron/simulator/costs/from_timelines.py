"""Costs from recorded iterations: the measured times of passes and communications.

The cost of a pass is its mean time within an iteration, because means add up to the work of a rank.
With several iterations the cost is the median of their means, because one iteration may be
disturbed. The cost of a kind of communication is the median of all its times. As in the simulator,
the time of a communication begins when the last rank has joined, so waiting for a slow peer does
not count as a slow network.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any, Final

from megatron.schedules.costs import Costs, Exchange, Time
from megatron.schedules.needs import (
    COMM_KINDS,
    REPLICA_KINDS,
    Comm,
    CommKind,
    needs,
    sources,
)
from megatron.schedules.passes import CHUNKED_KINDS, PASS_KINDS, PassKind
from megatron.schedules.plan import Plan
from megatron.simulator.simulate import Span, Timeline

MESSAGES: Final[tuple[CommKind, ...]] = ("X", "G")
"""Kinds of point-to-point transfers; the others are collectives."""

_Samples = dict[CommKind, list[float]]


def costs_from_timelines(plan: Plan, timelines: Sequence[Timeline]) -> Costs:
    """Return the costs of iterations of ``plan``, in the unit of their timelines.

    Passes of a chunk have a cost by rank and chunk, other passes by rank, and communications by
    kind. U, RG and AG have a cost by rank, which is the time of all buckets of the rank together.

    Recorded timelines do not show transfers (X and G). So the time of a transfer counts from the
    end of its source pass to the end of the wait for the transfer. Only waits that began before the
    source pass ended are used. A kind of transfer that no rank had to wait for has no cost, so it
    is free. The same holds for a kind of collective that did not occur.

    If the plan cuts microbatches, every slice has such costs, and a microbatch has their sums.
    """
    assert timelines, "costs are measured in at least one iteration"
    if plan.slices == 1:
        return _costs(plan, timelines)
    each = [
        _costs(plan, [_of_slice(own, number) for own in timelines]) for number in range(plan.slices)
    ]
    updates = [
        Timeline(own.ranks, tuple(s for s in own.spans if s.kind == "U")) for own in timelines
    ]
    return Costs(
        {
            **{kind: _sum([own.passes[kind] for own in each]) for kind in each[0].passes},
            **_pass_times(plan, updates),
        },
        {
            kind: _sum([own.comms[kind] for own in each if kind in own.comms])
            for kind in COMM_KINDS
            if any(kind in own.comms for own in each)
        },
        _exchanges(plan, timelines),
        slices=each,
    )


def _sum(times: Sequence[Any]) -> Any:
    """Return the sum of numbers, or of nested lists of one form."""
    if isinstance(times[0], (int, float)):
        return sum(times)
    return [_sum(parts) for parts in zip(*times, strict=True)]


def _of_slice(timeline: Timeline, number: int) -> Timeline:
    """Return the passes, communications and waits of one slice of every microbatch."""
    spans = (s for s in timeline.spans if s.kind != "U" and not s.is_exchange)
    return Timeline(
        timeline.ranks,
        tuple(s for s in spans if s.slice == number),
        tuple(wait for wait in timeline.waits if wait.slice == number),
    )


def _costs(plan: Plan, timelines: Sequence[Timeline]) -> Costs:
    """Return the costs of whole microbatches, or of the only slice in the timelines."""
    comms: _Samples = defaultdict(list)
    for timeline in timelines:
        for members in meetings(timeline).values():
            kind = next(kind for kind in COMM_KINDS if kind == members[0].kind)
            comms[kind].append(max(span.length for span in members))
        for kind, seconds in _messages(plan, timeline):
            comms[kind].append(seconds)
    return Costs(
        _pass_times(plan, timelines),
        {
            kind: median(comms[kind])
            for kind in COMM_KINDS
            if comms.get(kind) and kind not in REPLICA_KINDS
        },
        _exchanges(plan, timelines),
    )


def _exchanges(plan: Plan, timelines: Sequence[Timeline]) -> dict[CommKind, Exchange]:
    """Return the time of every rank's exchange with its replicas, by kind, if there is any."""
    found: dict[CommKind, Exchange] = {}
    for kind in REPLICA_KINDS:
        totals = [[0.0] * plan.ranks for _ in timelines]
        for total, timeline in zip(totals, timelines, strict=True):
            for span in timeline.spans:
                if span.is_exchange and span.kind == kind:
                    total[span.rank] += span.length
        times = list(map(median, zip(*totals, strict=True)))
        if any(times):
            found[kind] = Exchange(times)
    return found


def as_all_joined(replicas: Sequence[Timeline]) -> Timeline:
    """Return the first replica's timeline, with each exchange begun when the last replica joined.

    So waiting for a slow replica does not count as a slow link.

    Args:
        replicas: timelines of one iteration of all replicas, whose clocks agree.
    """
    joined: dict[tuple[int, str], float] = {}
    for timeline in replicas:
        for span in timeline.spans:
            place = span.rank, span.label
            if span.is_exchange:
                joined[place] = max(span.start, joined.get(place, span.start))
    first = replicas[0]
    spans = (
        span._replace(start=min(span.end, joined[span.rank, span.label]))
        if span.is_exchange
        else span
        for span in first.spans
    )
    return Timeline(first.ranks, tuple(spans), first.waits)


def meetings(timeline: Timeline) -> Mapping[str, list[Span]]:
    """Return the spans of every collective by its name; they begin when the last rank has joined.

    The span of a rank that left earlier has no length.
    """
    by_name: dict[str, list[Span]] = defaultdict(list)
    for span in timeline.spans:
        if span.lane == "comm" and span.kind not in MESSAGES:
            by_name[span.label].append(span)
    for spans in by_name.values():
        start = max(span.start for span in spans)
        spans[:] = [s._replace(start=start, end=max(start, s.end)) for s in spans]
    return by_name


def _pass_times(plan: Plan, timelines: Iterable[Timeline]) -> dict[PassKind, Time]:
    samples: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    for timeline in timelines:
        own: dict[tuple[str, int, int], list[float]] = defaultdict(list)
        passes = [span for span in timeline.spans if span.lane == "compute"]
        # Alone first: the parts of a pair's time count only where no pass of the kind ran alone.
        alone = {(span.kind, span.rank, span.chunk) for span in passes if not span.beside}
        for span in passes:
            key = span.kind, span.rank, span.chunk
            if not span.beside or key not in alone:
                own[key].append(span.length)
        for key, times_of_kind in own.items():
            mean_or_sum = sum if key[0] == "U" else fmean
            samples[key].append(mean_or_sum(times_of_kind))
    kinds = {kind for kind, _, _ in samples}
    times: dict[PassKind, Time] = {}
    for kind in PASS_KINDS:
        if kind not in kinds:
            continue
        chunks = range(plan.chunks if kind in CHUNKED_KINDS else 1)
        table = [[median(samples[kind, r, c]) for c in chunks] for r in range(plan.ranks)]
        times[kind] = table if kind in CHUNKED_KINDS else [time for (time,) in table]
    return times


def _messages(plan: Plan, timeline: Timeline) -> Iterator[tuple[CommKind, float]]:
    """Yield the kind and time of every transfer whose receiver began to wait before it was sent."""
    waits = {(wait.rank, wait.label): wait for wait in timeline.waits}
    ends = {(s.rank, s.label): s.end for s in timeline.spans if s.lane == "compute"}
    for rank, row in enumerate(plan.rows):
        for need in (need for item in row for need in needs(plan, rank, item)):
            wait = waits.get((rank, str(need)))
            if wait is None or not isinstance(need, Comm) or need.kind not in MESSAGES:
                continue
            ((sender, made_by),) = sources(plan, need)
            sent = ends[sender, str(made_by)]
            if wait.start <= sent <= wait.end:
                yield need.kind, wait.end - sent
