"""A timeline in Chrome's trace event format, which Perfetto and chrome://tracing open.

A rank is a process. It has a thread for its passes, one for the collectives, and one for each
direction of each link to a neighbour. Arrows lead from everything to what waits for it.
"""

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from megatron.schedules.lower import lane
from megatron.schedules.needs import Comm, Need, needs, participants, sources
from megatron.schedules.passes import Pass
from megatron.schedules.plan import Plan
from megatron.simulator.simulate import Span, Timeline

Event = dict[str, object]
Thread = tuple[str | int, ...]
"""What runs one after another: a lane of communications, or ``_COMPUTE``."""

_COMPUTE: Final[Thread] = ("compute",)


class _Slice(NamedTuple):
    """Where and when something is shown; times in nanoseconds, what the viewers count in."""

    rank: int
    thread: int
    start: int
    end: int

    def at(self, nanoseconds: int) -> Event:
        """Return the place of an event on this thread."""
        return {"pid": self.rank, "tid": self.thread, "ts": nanoseconds / 1000}


Slices = Mapping[tuple[int, Need], _Slice]


def chrome_trace(plan: Plan, timeline: Timeline) -> dict[str, object]:
    """Return a simulated ``timeline`` as the JSON document of a trace.

    A unit of time is shown as a microsecond. Communications that take no time are not shown: arrows
    then lead from pass to pass. Nor are arrows at passes that take no time.

    Args:
        plan: what was simulated; tells what waits for what.
        timeline: when it ran.
    """
    threads = _threads(plan)
    comms = {str(comm): comm for comm in _comms(plan)}
    events = list(_names(threads))
    slices: dict[tuple[int, Need], _Slice] = {}
    for span in timeline.spans:
        compute = span.lane == "compute"
        item = Pass.parse(span.label) if compute else comms[span.label]
        thread = threads[span.rank].index(_COMPUTE if isinstance(item, Pass) else lane(plan, item))
        start, end = round(span.start * 1000), round(span.end * 1000)
        shown = _Slice(span.rank, thread, start, end)
        events.append(_complete(span, shown))
        if end > start:
            slices[span.rank, item] = shown
    for number, (source, target) in enumerate(_arrows(plan, slices)):
        events += _arrow(number, source, target)
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def _comms(plan: Plan) -> Iterator[Comm]:
    for rank, row in enumerate(plan.rows):
        for item in row:
            yield from (need for need in needs(plan, rank, item) if isinstance(need, Comm))


def _threads(plan: Plan) -> list[list[Thread]]:
    """Return the threads of every rank in the order in which they are shown."""
    threads: list[set[Thread]] = [set() for _ in range(plan.ranks)]
    for comm in _comms(plan):
        if comm.microbatch == 0:
            for rank in participants(plan, comm):
                threads[rank].add(lane(plan, comm))
    return [[_COMPUTE, *sorted(lanes, key=lambda key: (len(key), key))] for lanes in threads]


def _names(threads: list[list[Thread]]) -> Iterator[Event]:
    """Yield what gives processes and threads their names and order."""
    for rank, own in enumerate(threads):
        yield _meta("process_name", rank, 0, name=f"rank {rank}")
        yield _meta("process_sort_index", rank, 0, sort_index=rank)
        for number, thread in enumerate(own):
            yield _meta("thread_name", rank, number, name=_thread_name(rank, thread))
            yield _meta("thread_sort_index", rank, number, sort_index=number)


def _thread_name(rank: int, thread: Thread) -> str:
    if len(thread) == 1:
        return "compute" if thread == _COMPUTE else "communication: collectives"
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
    """Yield the two ends of an arrow; viewers look for the slices that lie around them."""
    common: Event = {"name": "needs", "cat": "needs", "id": number}
    yield {"ph": "s", **common, **source.at(source.end - 1)}
    yield {"ph": "f", "bp": "e", **common, **target.at(target.start)}


def _arrows(plan: Plan, slices: Slices) -> Iterator[tuple[_Slice, _Slice]]:
    """Yield where every arrow begins and ends."""
    for (rank, item), target in slices.items():
        if isinstance(item, Comm):
            own = [slices.get(source) for source in sources(plan, item) if source[0] == rank]
        else:
            own = [_origin(plan, slices, rank, need) for need in needs(plan, rank, item)]
        yield from ((source, target) for source in own if source is not None)


def _origin(plan: Plan, slices: Slices, rank: int, need: Need) -> _Slice | None:
    """Return what is shown of a need of a pass on ``rank``.

    Of a communication that comes from one rank it is that rank's part, so that the arrow crosses
    over. Of one that is not shown it is the last of its sources: arrows from all would be p x p for
    every barrier.
    """
    if isinstance(need, Pass):
        return slices.get((rank, need))
    origins = sources(plan, need)
    shown = slices.get((origins[0][0] if len(origins) == 1 else rank, need))
    if shown is not None:
        return shown
    passes = [slices[origin] for origin in origins if origin in slices]
    return max(passes, key=lambda source: source.end, default=None)
