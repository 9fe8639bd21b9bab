"""A timeline in Chrome's trace event format, which Perfetto and chrome://tracing open.

A rank is a process in the trace. Its threads are: its passes, its waits, the collectives, each
direction of each link to a neighbour, its exchange with replicas, its host, and the exchange of
tokens within its passes. A pair whose segments are known is shown in segments. Arrows lead from
each pass or communication to the passes and communications that wait for it. The exchange with
replicas has no arrows, because the plan does not tell which passes a bucket belongs to.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from megatron.native.files import replace_text
from megatron.schedules.lower import lane
from megatron.schedules.needs import (
    HOST_KINDS,
    REPLICA_KINDS,
    Comm,
    Need,
    needs,
    participants,
    sources,
)
from megatron.schedules.passes import PASS_KINDS, Pass
from megatron.schedules.plan import Plan
from megatron.simulator.simulate import Span, Timeline

Event = dict[str, object]
Thread = tuple[str | int, ...]
"""A lane of events that follow one another: one of communications, ``_COMPUTE`` or ``_WAIT``."""

_COMPUTE: Final[Thread] = ("compute",)
_WAIT: Final[Thread] = ("wait",)
_TOKENS: Final[Thread] = ("tokens",)
_THREAD_NAMES: Final[Mapping[Thread, str]] = {
    _COMPUTE: "compute",
    _WAIT: "waiting",
    _TOKENS: "communication: tokens of experts",
    ("vocabulary",): "communication: collectives",
}


class _Slice(NamedTuple):
    """The thread and the times of a box in the trace, in nanoseconds, the unit of the viewers."""

    rank: int
    thread: int
    start: int
    end: int

    def joined(self, other: "_Slice | None") -> "_Slice":
        """Return one slice that covers this one and ``other``, if there is an ``other``."""
        if other is None:
            return self
        return self._replace(start=min(self.start, other.start), end=max(self.end, other.end))

    def at(self, nanoseconds: int) -> Event:
        """Return the fields that place an event on this thread at this time."""
        return {"pid": self.rank, "tid": self.thread, "ts": nanoseconds / 1000}


Slices = Mapping[tuple[int, Need], _Slice]


def chrome_trace(plan: Plan, timeline: Timeline, microseconds: float = 1.0) -> dict[str, object]:
    """Return a ``timeline`` as the JSON document of a trace.

    Communications that take no time or were not recorded are not shown; arrows then lead from pass
    to pass. Passes that take no time have no arrows.

    Args:
        plan: the plan that ran; it gives the dependencies.
        timeline: the timeline of the plan.
        microseconds: microseconds to show for one unit of time; 1e6 for a recorded timeline, which
            is in seconds.
    """
    spans = (*timeline.spans, *timeline.waits)
    comms = {str(comm): comm for comm in (*_comms(plan), *_exchanged(spans), *_copied(spans))}
    threads = _threads(plan, comms.values(), has_tokens=bool(timeline.segments))
    events = list(_names(threads))
    work = [span for span in timeline.segments if span.lane == "work"]
    in_segments = {(span.rank, span.label) for span in work}
    slices: dict[tuple[int, Need], _Slice] = {}
    for span in (*spans, *timeline.segments):
        of_pass = span.lane in ("compute", "work", "tokens")
        item: Need = _pass(span) if of_pass else comms[span.label]
        thread = threads[span.rank].index(_thread(plan, span, item))
        start, end = (round(time * microseconds * 1000) for time in (span.start, span.end))
        shown = _Slice(span.rank, thread, start, end)
        if span.lane != "compute" or (span.rank, span.label) not in in_segments:
            events.append(_complete(span, shown))
            if end > start and span.lane not in ("wait", "tokens"):
                slices[span.rank, item] = shown.joined(slices.get((span.rank, item)))
    for number, (source, target) in enumerate(_arrows(plan, slices)):
        events += _arrow(number, source, target)
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def save_chrome_trace(
    plan: Plan, timeline: Timeline, path: Path, microseconds: float = 1.0
) -> None:
    """Write the document of ``chrome_trace`` to ``path``, either completely or not at all.

    A link of this name is replaced by the file, because a run makes the name up itself.

    Raises:
        OSError: if the file cannot be written; the message names the file.
    """
    replace_text(path, json.dumps(chrome_trace(plan, timeline, microseconds)))


def _thread(plan: Plan, span: Span, item: Need) -> Thread:
    if isinstance(item, Pass):
        return _TOKENS if span.lane == "tokens" else _COMPUTE
    return _WAIT if span.lane == "wait" else lane(plan, item)


def _comms(plan: Plan) -> Iterator[Comm]:
    for rank, row in enumerate(plan.rows):
        for item in row:
            yield from (need for need in needs(plan, rank, item) if isinstance(need, Comm))


def _exchanged(spans: Iterable[Span]) -> Iterator[Comm]:
    """Yield the communications with replicas, which are not in the plan."""
    for span in spans:
        for kind in REPLICA_KINDS:
            if span.kind == kind:
                yield Comm(kind, span.microbatch, span.rank)


def _copied(spans: Iterable[Span]) -> Iterator[Comm]:
    """Yield the copies to and from hosts, which are not in the rows; the label has the stage."""
    for span in spans:
        for kind in HOST_KINDS:
            if span.kind == kind:
                yield Comm(kind, span.microbatch, int(span.label.rpartition(" ")[2]))


def _pass(span: Span) -> Pass:
    kind = next(kind for kind in PASS_KINDS if kind == span.kind)
    return Pass(kind, span.microbatch, span.chunk, span.slice)


def _threads(plan: Plan, comms: Iterable[Comm], *, has_tokens: bool) -> list[list[Thread]]:
    """Return the threads of every rank in the order in which they are shown."""
    threads: list[set[Thread]] = [set() for _ in range(plan.ranks)]
    for comm in comms:
        if comm.microbatch == 0 or comm.kind in (*REPLICA_KINDS, *HOST_KINDS):
            for rank in participants(plan, comm):
                threads[rank].add(lane(plan, comm))
    first = [_COMPUTE, _WAIT, _TOKENS] if has_tokens else [_COMPUTE, _WAIT]
    return [[*first, *sorted(lanes, key=lambda key: (len(key), key))] for lanes in threads]


def _names(threads: list[list[Thread]]) -> Iterator[Event]:
    """Yield the events that give processes and threads their names and order."""
    for rank, own in enumerate(threads):
        yield _meta("process_name", rank, 0, name=f"rank {rank}")
        yield _meta("process_sort_index", rank, 0, sort_index=rank)
        for number, thread in enumerate(own):
            yield _meta("thread_name", rank, number, name=_thread_name(rank, thread))
            yield _meta("thread_sort_index", rank, number, sort_index=number)


def _thread_name(rank: int, thread: Thread) -> str:
    if thread in _THREAD_NAMES:
        return _THREAD_NAMES[thread]
    if thread == ("replicas", rank):
        return "communication: replicas"
    if thread == ("host", rank):
        return "communication: host"
    kind, sender, receiver = thread
    other = f"to rank {receiver}" if sender == rank else f"from rank {sender}"
    return f"communication: {kind} {other}"


def _meta(what: str, rank: int, thread: int, **values: object) -> Event:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": values}


def _complete(span: Span, shown: _Slice) -> Event:
    return {
        "ph": "X",
        "name": span.label,
        "cat": span.lane,
        **shown.at(shown.start),
        "dur": (shown.end - shown.start) / 1000,
        "args": {"kind": span.kind, "microbatch": span.microbatch, "chunk": span.chunk},
    }


def _arrow(number: int, source: _Slice, target: _Slice) -> Iterator[Event]:
    """Yield the two ends of an arrow; viewers attach them to the slices around these points."""
    common: Event = {"name": "needs", "cat": "needs", "id": number}
    yield {"ph": "s", **common, **source.at(source.end - 1)}
    yield {"ph": "f", "bp": "e", **common, **target.at(target.start)}


def _arrows(plan: Plan, slices: Slices) -> Iterator[tuple[_Slice, _Slice]]:
    """Yield the slices at which every arrow begins and ends."""
    for (rank, item), target in slices.items():
        if isinstance(item, Comm) and item.kind in REPLICA_KINDS:
            continue
        if isinstance(item, Comm):
            own = [slices.get(source) for source in sources(plan, item) if source[0] == rank]
        else:
            own = [_origin(plan, slices, rank, need) for need in needs(plan, rank, item)]
        yield from ((source, target) for source in own if source is not None)


def _origin(plan: Plan, slices: Slices, rank: int, need: Need) -> _Slice | None:
    """Return the slice at which the arrow to a pass on ``rank`` begins, for one of its needs.

    If one rank sends the communication, the arrow begins at the slice of that rank, so it goes from
    rank to rank. If the communication is not shown, the arrow begins at the pass that was its last
    source: arrows from all sources would be p x p arrows for every barrier.
    """
    if isinstance(need, Pass):
        return slices.get((rank, need))
    origins = sources(plan, need)
    shown = slices.get((origins[0][0] if len(origins) == 1 else rank, need))
    if shown is not None:
        return shown
    passes = [slices[origin] for origin in origins if origin in slices]
    return max(passes, key=lambda source: source.end, default=None)
