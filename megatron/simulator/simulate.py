"""Compute the timeline of a program with given costs. The runtime executes the same program.

Each rank has a compute lane, and communication lanes that overlap with it. A communication begins
when every participant has issued it and its lane is free. It ends after the time that is its cost.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megatron.schedules.buckets import gathering, reduction
from megatron.schedules.costs import UNIT_COSTS, Costs
from megatron.schedules.lower import Program, Run, Start, lane
from megatron.schedules.needs import REPLICA_KINDS, Comm, participants
from megatron.schedules.passes import Pass
from megatron.schedules.timing import longest_span, working


class Span(NamedTuple):
    """A pass, a communication or a wait on one rank.

    Attributes:
        lane: ``compute``, ``comm``, or ``wait`` where the rank waited for a communication.
        label: text form of the pass or communication.
        chunk: model chunk of the pass; 0 for communications.
        beside: for a pass of a pair, the label of the other one. A rank runs both from the start of
            the F to the end of the B. Their spans share this time: the F has the first part, the
            B the second.
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
    walk = _Walk(program, costs)
    awake = list(range(program.plan.ranks))
    while awake:
        awake.extend(walk.advance(awake.pop()))
    if any(at < len(row) for at, row in zip(walk.position, program.rows, strict=True)):
        raise ValueError("the program deadlocks: it was not lowered from a checked plan")
    return Timeline(program.plan.ranks, tuple(walk.spans), tuple(walk.waits))


def pair_spans(
    rank: int, pair: tuple[Pass, Pass], start: float, middle: float, end: float
) -> tuple[Span, Span]:
    """Return the spans of a pair that a rank runs from ``start`` to ``end``."""
    forward, backward = pair
    return (
        pass_span(rank, forward, start, middle, str(backward)),
        pass_span(rank, backward, middle, end, str(forward)),
    )


def pass_span(rank: int, item: Pass, start: float, end: float, beside: str = "") -> Span:
    """Return the span of a pass."""
    kind, microbatch, chunk, slice_ = item
    return Span(rank, "compute", str(item), kind, microbatch, chunk, start, end, beside, slice_)


def comm_span(rank: int, lane_: str, comm: Comm, start: float, end: float) -> Span:
    """Return the span of a communication (lane ``comm``) or of a wait for it (``wait``)."""
    label, kind, microbatch = str(comm), comm.kind, comm.microbatch
    return Span(rank, lane_, label, kind, microbatch, 0, start, end, slice=comm.slice)


def pass_time(program: Program, costs: Costs, rank: int, item: Pass) -> float:
    """Return the time of a pass of ``program``; U takes its bucket's share of the cost of U.

    The share is that of the gradients: of a gathering, a bucket in 8 bits has a smaller one.
    """
    share, shares = 1.0, program.shares
    if item.kind == "U":
        gathered = shares[gathering(rank, item.microbatch)]
        share = shares.get(reduction(rank, item.microbatch), gathered)
    return costs.of_pass(program.plan, rank, item, share)


def comm_time(program: Program, costs: Costs, comm: Comm) -> float:
    """Return the time of a communication of ``program``; a bucket takes its share of the cost."""
    return costs.of_comm(comm, program.shares.get(comm, 1.0), program.plan.slices)


class _Walk:
    """The state of one simulation."""

    def __init__(self, program: Program, costs: Costs) -> None:
        ranks = program.plan.ranks
        self.program = program
        self.costs = costs
        self.position = [0] * ranks
        self.spans: list[Span] = []
        self.waits: list[Span] = []
        self._clock = [0.0] * ranks
        self._issued: dict[Comm, dict[int, float]] = {}
        self._done: dict[Comm, float] = {}
        self._lane_free: dict[tuple[str | int, ...], float] = {}
        self._sleepers: dict[Comm, list[int]] = {}

    def advance(self, rank: int) -> list[int]:
        """Let ``rank`` go on until it must wait; return the ranks that can go on afterwards."""
        row = self.program.rows[rank]
        woken: list[int] = []
        while self.position[rank] < len(row):
            step = row[self.position[rank]]
            if isinstance(step, Run):
                self._run(rank, step)
            elif isinstance(step, Start):
                woken.extend(self._issue(rank, step.comm))
            elif step.comm in self._done:
                self._wait(rank, step.comm)
            else:
                self._sleepers.setdefault(step.comm, []).append(rank)
                break
            self.position[rank] += 1
        return woken

    def _run(self, rank: int, step: Run) -> None:
        start, item = self._clock[rank], step.item
        time = pass_time(self.program, self.costs, rank, item)
        if step.joined is None:
            self._clock[rank] = end = start + time
            self.spans.append(pass_span(rank, item, start, end))
            return
        pair, plan = (item, step.joined), self.program.plan
        taken = self.costs.of_pair(plan, rank, pair)
        both = time + pass_time(self.program, self.costs, rank, step.joined)
        self._clock[rank] = end = start + taken
        middle = start + taken * (time / both if both else 0.0)
        self.spans.extend(pair_spans(rank, pair, start, middle, end))

    def _wait(self, rank: int, comm: Comm) -> None:
        start, end = self._clock[rank], self._done[comm]
        if end > start:
            self._clock[rank] = end
            self.waits.append(comm_span(rank, "wait", comm, start, end))

    def _issue(self, rank: int, comm: Comm) -> list[int]:
        members = participants(self.program.plan, comm)
        issued = self._issued.setdefault(comm, {})
        issued[rank] = self._clock[rank]
        if len(issued) < len(members):
            return []
        queue = lane(self.program.plan, comm)
        start = max(*issued.values(), self._lane_free.get(queue, 0.0))
        end = start + comm_time(self.program, self.costs, comm)
        self._lane_free[queue] = self._done[comm] = end
        if end > start:
            self.spans.extend(comm_span(member, "comm", comm, start, end) for member in members)
        return self._sleepers.pop(comm, [])
