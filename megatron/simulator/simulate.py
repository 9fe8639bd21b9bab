"""Compute the timeline of a program with given costs. The runtime executes the same program."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megatron.schedules.costs import UNIT_COSTS, Costs
from megatron.schedules.lower import Program, Run, Start
from megatron.schedules.needs import REPLICA_KINDS, Comm
from megatron.schedules.passes import Pass
from megatron.schedules.timing import longest_span, working
from megatron.simulator.clocks import Clocks


class Span(NamedTuple):
    """A pass, a communication or a wait on one rank.

    Attributes:
        lane: ``compute``, ``comm``, or ``wait`` where the rank waited for a communication.
        label: text form of the pass or communication.
        chunk: model chunk of the pass; 0 for communications.
        beside: for a pass of a pair, the label of the other one. A rank runs both from the start of
            the first to the end of the second. Their spans share this time: the first has the first
            part, the second the rest.
        slice: slice of the microbatch.
    """

    rank: int
    lane: str
    label: str
    kind: str
    microbatch: int
    chunk: int
    start: float
    end: float
    beside: str = ""
    slice: int = 0

    @property
    def length(self) -> float:
        """Time from the start of the span to its end."""
        return self.end - self.start

    @property
    def leads(self) -> bool:
        """Whether the span is of the first pass of a pair: of an F, or of a B without an F."""
        is_first = self.kind == "F" or (self.kind == "B" and not self.beside.startswith("F"))
        return bool(self.beside) and is_first

    @property
    def is_exchange(self) -> bool:
        """Whether the span is a communication with replicas."""
        return self.lane == "comm" and self.kind in REPLICA_KINDS


@dataclass(frozen=True)
class Timeline:
    """The times of all passes, communications and waits: simulated, or recorded by the runtime.

    Attributes:
        spans: all passes and communications, in no particular order.
        waits: all waits of ranks, labelled by the communication; in no particular order.
        segments: for drawings, parts of passes that exchange tokens of experts: where the tokens
            travel (lane ``tokens``), and where a pass of a pair works (``work``). A segment is
            labelled as its pass; ``segments.with_segments`` makes them.
    """

    ranks: int
    spans: tuple[Span, ...]
    waits: tuple[Span, ...] = ()
    segments: tuple[Span, ...] = ()

    @classmethod
    def of_lanes(cls, ranks: int, spans: Iterable[Span]) -> "Timeline":
        """Return the timeline made of ``spans``; spans in the lane ``wait`` become its waits."""
        waits: list[Span] = []
        others: list[Span] = []
        for span in spans:
            (waits if span.lane == "wait" else others).append(span)
        return cls(ranks, tuple(others), tuple(waits))

    @property
    def end(self) -> float:
        """End of the last span."""
        return max((span.end for span in self.spans), default=0.0)

    def compute(self, rank: int) -> list[Span]:
        """Return the passes of ``rank`` in order."""
        return self._compute[rank]

    @cached_property
    def _compute(self) -> list[list[Span]]:
        rows: list[list[Span]] = [[] for _ in range(self.ranks)]
        for span in self.spans:
            if span.lane == "compute":
                rows[span.rank].append(span)
        for row in rows:
            row.sort(key=lambda s: (s.start, s.end))
        return rows

    def work(self, rank: int) -> float:
        """Return the time that ``rank`` spends in passes."""
        return sum(span.length for span in self.compute(rank))

    def bubble_rate(self) -> float:
        """Return 1 - work / span over all ranks.

        The span is the longest time between a rank's first start and last end, as in the
        zero-bubble papers (arXiv 2401.10241, section 5.3). Passes that take no time do not count.
        """
        rows = map(self.compute, range(self.ranks))
        span = longest_span(working([s.start for s in r], [s.end for s in r]) for r in rows)
        return 1 - sum(map(self.work, range(self.ranks))) / (self.ranks * span)

    def idle(self) -> float:
        """Return the share of the time from 0 to ``end`` in which ranks run no pass, on average."""
        return 1 - sum(map(self.work, range(self.ranks))) / (self.ranks * self.end)


def simulate(program: Program, costs: Costs = UNIT_COSTS) -> Timeline:
    """Return the timeline of ``program``.

    Raises:
        ValueError: if a kind of pass has no cost, or the program deadlocks.
    """
    return timeline_of(Clocks(program, costs))


def timeline_of(clocks: Clocks) -> Timeline:
    """Return the timeline of a program that is simulated already."""
    spans, waits = list[Span](), list[Span]()
    missing = list(map(len, clocks.numbered.members))
    for stretch in clocks.stretches:
        rank, first, end = stretch
        row, after = clocks.numbered.program.rows[rank], clocks.after[rank]
        numbers = clocks.numbered.rows[rank]
        before = after[first - 1] if first else 0.0
        for at in range(first, end):
            step, number, now = row[at], numbers[at], after[at]
            if isinstance(step, Run):
                spans.extend(_run_spans(clocks, rank, step, number, before, now))
            elif not isinstance(step, Start):
                if now > before:
                    waits.append(comm_span(rank, "wait", step.comm, before, now))
            else:
                comm = -number >> 1
                missing[comm] -= 1
                begun, done = clocks.begins[comm], clocks.ends[comm]
                if not missing[comm] and done > begun:
                    members = clocks.numbered.members[comm]
                    spans.extend(comm_span(m, "comm", step.comm, begun, done) for m in members)
            before = now
    return Timeline(clocks.program.plan.ranks, tuple(spans), tuple(waits))


def _run_spans(
    clocks: Clocks, rank: int, step: Run, number: int, start: float, end: float
) -> tuple[Span, ...]:
    """Return the spans of a pass or of a pair, given by its number too."""
    first = clocks.first_part(rank, number)
    if first is None or step.joined is None:
        return (pass_span(rank, step.item, start, end),)
    return pair_spans(rank, (step.item, step.joined), start, start + first, end)


def pair_spans(
    rank: int, pair: tuple[Pass, Pass], start: float, middle: float, end: float
) -> tuple[Span, Span]:
    """Return the spans of a pair that a rank runs from ``start`` to ``end``."""
    first, second = pair
    return (
        pass_span(rank, first, start, middle, str(second)),
        pass_span(rank, second, middle, end, str(first)),
    )


def pass_span(rank: int, item: Pass, start: float, end: float, beside: str = "") -> Span:
    """Return the span of a pass."""
    kind, microbatch, chunk, slice_ = item
    return Span(rank, "compute", str(item), kind, microbatch, chunk, start, end, beside, slice_)


def comm_span(rank: int, lane_: str, comm: Comm, start: float, end: float) -> Span:
    """Return the span of a communication (lane ``comm``) or of a wait for it (``wait``)."""
    label, kind, microbatch = str(comm), comm.kind, comm.microbatch
    return Span(rank, lane_, label, kind, microbatch, 0, start, end, slice=comm.slice)
