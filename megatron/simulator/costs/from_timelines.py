"""Costs from recorded iterations: what passes and communications took.

Of passes the mean of an iteration counts, the sum of which is the work of a rank, and of several
iterations the median, since one may be disturbed; of communications the median of all.
What a plan made of them predicts can then be held against what the run does. A communication is
charged as the simulator charges it, from when the last rank has come, so that waiting for a slow
peer is not taken for a slow network.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Final

from megatron.schedules.costs import Costs, Time
from megatron.schedules.needs import COMM_KINDS, Comm, CommKind, needs, sources
from megatron.schedules.passes import CHUNKED_KINDS, PASS_KINDS, PassKind
from megatron.schedules.plan import Plan
from megatron.simulator.simulate import Span, Timeline

MESSAGES: Final[tuple[CommKind, ...]] = ("X", "G")
"""Kinds of point-to-point transfers; the others are collectives."""

_Samples = dict[CommKind, list[float]]


def costs_from_timelines(plan: Plan, timelines: Sequence[Timeline]) -> Costs:
    """Return the costs of iterations of ``plan``, in the unit of the timelines.

    F, B and W by rank and chunk, the other passes by rank, communications by kind. Transfers are
    not in recorded timelines: one takes from the end of the pass that it carries on to the end of
    the wait for it, where that wait began earlier. Those that nobody ever had to wait for, and
    collectives of which there are none, are left out, and so are free.

    Args:
        plan: what ran.
        timelines: of at least one iteration, from all ranks.
    """
    assert timelines, "costs are measured in at least one iteration"
    comms: _Samples = defaultdict(list)
    for timeline in timelines:
        for members in meetings(timeline).values():
            kind = next(kind for kind in COMM_KINDS if kind == members[0].kind)
            comms[kind].append(max(span.end - span.start for span in members))
        for kind, seconds in _messages(plan, timeline):
            comms[kind].append(seconds)
    return Costs(
        _pass_times(plan, timelines),
        {kind: median(comms[kind]) for kind in COMM_KINDS if kind in comms},
    )


def meetings(timeline: Timeline) -> Mapping[str, list[Span]]:
    """Return the spans of every collective by its name, each from when the last rank has come.

    A rank that left before the last one came has a span of no length.
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
        for span in timeline.spans:
            if span.lane == "compute":
                own[span.kind, span.rank, span.chunk].append(span.end - span.start)
        for key, times_of_kind in own.items():
            samples[key].append(fmean(times_of_kind))
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
    """Yield the kind and time of every transfer that was waited for before it was sent."""
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
