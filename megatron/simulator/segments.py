"""When a pass that exchanges tokens of experts works, and when its tokens travel: for drawings.

In such a pass work and exchanges take turns: F works before each of its exchanges, and B after each
of its exchanges. A pass that runs alone idles while its tokens travel. In a pair the other pass
works meanwhile. So a pair has rounds: in each round first the first pass works during an exchange
of the second, and then the second during an exchange of the first. That is the order of the usual
turns; a plan may have better ones (``schedules/turn_order.py``), which are not drawn. All rounds
are drawn equally long. The pass with more exchanges goes on alone after the last round. Rounds and
rest together are as long as the pair.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from megatron.schedules.costs import Costs
from megatron.schedules.pair_time import time_by_sums
from megatron.schedules.passes import CHUNKED_KINDS, PASS_KINDS, Pass, PassKind
from megatron.schedules.plan import Plan
from megatron.simulator.simulate import Span, Timeline

_WORKS_FIRST: Final[tuple[PassKind, ...]] = ("F", "R")


def with_segments(timeline: Timeline, plan: Plan, costs: Costs) -> Timeline:
    """Return a simulated timeline with its segments.

    If passes were slower than their costs say, segments are longer by the same factor.
    """
    if not costs.waits:
        return timeline
    others = {(span.rank, span.label): span for span in timeline.spans if span.beside}
    segments: list[Span] = []
    for span in timeline.spans:
        if span.lane != "compute" or span.kind not in CHUNKED_KINDS:
            continue
        if not span.beside:
            segments.extend(_alone(span, plan, costs))
        elif span.leads:
            segments.extend(_of_pair(span, others[span.rank, span.beside], plan, costs))
    return replace(timeline, segments=tuple(segments))


def _alone(span: Span, plan: Plan, costs: Costs) -> Iterator[Span]:
    """Yield the exchanges of a pass that runs alone."""
    item = _pass(span)
    time, wait = costs.of_pass(plan, span.rank, item), costs.waits_of(plan, span.rank, item)
    if not wait:
        return
    turns, slower = costs.journeys_of(plan, span.rank, item), span.length / time
    for turn in range(turns):
        before = turn * time + (time - wait if item.kind in _WORKS_FIRST else 0.0)
        begin = span.start + slower * before / turns
        yield span._replace(lane="tokens", start=begin, end=begin + slower * wait / turns)


def _of_pair(first: Span, second: Span, plan: Plan, costs: Costs) -> Iterator[Span]:
    """Yield the work and the exchanges of a pair."""
    rank, pair = first.rank, (first, second)
    items = _pass(first), _pass(second)
    if not any(costs.waits_of(plan, rank, item) for item in items):
        return
    by_sums = time_by_sums(*(costs.in_turns(plan, rank, item) for item in items))
    slower = (second.end - first.start) / by_sums
    turns = [max(1, costs.journeys_of(plan, rank, item)) for item in items]
    waits = [slower * costs.waits_of(plan, rank, items[i]) / turns[i] for i in (0, 1)]
    works = [slower * costs.of_pass(plan, rank, items[i]) / turns[i] - waits[i] for i in (0, 1)]
    start = first.start
    for turn in range(max(turns)):
        for own, other in ((0, 1), (1, 0)):
            work = works[own] if turn < turns[own] else 0.0
            travel = waits[other] if turn < turns[other] else 0.0
            if work:
                yield pair[own]._replace(lane="work", start=start, end=start + work)
            if travel:
                yield pair[other]._replace(lane="tokens", start=start, end=start + travel)
            start += max(work, travel)


def _pass(span: Span) -> Pass:
    kind = next(kind for kind in PASS_KINDS if kind == span.kind)
    return Pass(kind, span.microbatch, span.chunk, span.slice)
