"""Fill gaps: take passes in the order of a base schedule, and move each to the first gap it fits.

List scheduling goes forward in time, so it may start a pass that makes a more urgent pass late: it
knows the start of a pass only when all needs of this pass have begun. Here a pass that starts
earlier in the base is placed first, and later passes get the gaps that are left. So no pass is ever
later than in the base. Project scheduling calls this way the serial scheme, and list scheduling the
parallel scheme (Kolisch 1996). The greedy rule of arXiv 2405.15362 (section 4.2) works in this way.
"""

import heapq
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Final

from megatron.schedules.held import Held
from megatron.schedules.search.justify import Scheduled, scheduled
from megatron.schedules.search.list_schedule import Problem, Rows

_ROUNDING: Final = 1e-9
"""Share of the longest pass by which a gap may be too short."""
_CLEAR: Final = 1e-6
"""Share of the longest pass by which a pass must start after another to count as later."""


def fill_gaps(problem: Problem, base: Scheduled) -> Scheduled:
    """Return ``base`` with every pass as early as the passes before it in the base allow.

    Passes of one kind and chunk keep their order, and ranks keep their limits.

    Args:
        problem: the passes and the limits of memory; no pass is bound to follow another.
        base: a schedule that keeps the limits.
    """
    assert not problem.graph.followed_by, "a pass put between two that are bound would part them"
    return scheduled(problem, _Run(problem, base).rows())


@dataclass
class _Rank:
    """A rank, and the passes that it has been given so far.

    Attributes:
        head: index of the next pass in the base row.
        offered: whether this pass is in the queue of passes that can be placed.
        row: the passes in their new order.
        starts: the start of each pass in ``row``.
        ends: the end of each pass in ``row``.
        held: for every quantity in ``Held``, how much the rank holds after each pass in ``row``.
    """

    head: int = 0
    offered: bool = False
    row: list[int] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    held: tuple[list[float], ...] = field(
        default_factory=lambda: tuple(list[float]() for _ in Held._fields)
    )


class _Run:
    """The state of one filling of gaps."""

    def __init__(self, problem: Problem, base: Scheduled) -> None:
        graph = problem.graph
        m, longest = graph.microbatches, max(graph.times, default=0.0)
        self._graph, self._base, self._limits = graph, base, problem.limits
        self._ranks = [_Rank() for _ in base.rows]
        self._offers: list[tuple[float, int]] = []
        self._rounding, self._clear = _ROUNDING * longest, _CLEAR * longest
        self._changes = [[(i, c) for i, c in enumerate(all_) if c] for all_ in problem.changes]
        self._ends = [[0.0] * m for _ in graph.passes]
        self._arrival = [0.0] * (m * len(graph.comms))
        self._missing = [count for count in graph.sources for _ in range(m)]

    def rows(self) -> Rows:
        """Place all passes, in the order of their starts in the base."""
        for rank in range(len(self._ranks)):
            self._offer(rank)
        while self._offers:
            _, rank = heapq.heappop(self._offers)
            self._place(rank)
        rows = [state.row for state in self._ranks]
        assert list(map(len, rows)) == list(map(len, self._base.rows)), "the base does not run"
        return rows

    def _offer(self, rank: int) -> None:
        """Let the next pass of ``rank`` be placed if the arrival of all its needs is known."""
        state, base = self._ranks[rank], self._base
        if state.offered or state.head == len(base.rows[rank]):
            return
        number, microbatch = divmod(base.rows[rank][state.head], self._graph.microbatches)
        comms = self._graph.comm_needs[number]
        if not any(self._missing[c * self._graph.microbatches + microbatch] for c in comms):
            heapq.heappush(self._offers, (base.starts[rank][state.head], rank))
            state.offered = True

    def _place(self, rank: int) -> None:
        graph, state = self._graph, self._ranks[rank]
        item = self._base.rows[rank][state.head]
        number, microbatch = divmod(item, graph.microbatches)
        arrival, time = self._arrives(number, microbatch), graph.times[number]
        at, start = self._gap(rank, number, arrival)
        state.row.insert(at, item)
        state.starts.insert(at, start)
        state.ends.insert(at, start + time)
        for levels in state.held:
            levels.insert(at, levels[at - 1] if at else 0.0)
        for i, change in self._changes[number]:
            levels = state.held[i]
            levels[at:] = [level + change for level in levels[at:]]
        state.head, state.offered = state.head + 1, False
        self._ends[number][microbatch] = start + time
        self._offer(rank)
        self._send(number, microbatch, start + time)

    def _arrives(self, number: int, microbatch: int) -> float:
        """Return when all needs of a pass are met and the previous pass of its kind has ended."""
        graph = self._graph
        ends = [self._ends[need][microbatch] for need in graph.own_needs[number]]
        before, earlier = graph.previous[number] if graph.previous else (number, 1)
        if microbatch >= earlier:
            ends.append(self._ends[before][microbatch - earlier])
        for comm in graph.comm_needs[number]:
            ends.append(self._arrival[comm * graph.microbatches + microbatch])
        return max(ends, default=0.0)

    def _gap(self, rank: int, number: int, arrival: float) -> tuple[int, float]:
        """Return the place of a pass: the index of the pass that will follow it, and its start."""
        state, time = self._ranks[rank], self._graph.times[number]
        # Before a pass that starts sooner, no gap can be long enough.
        after = arrival + max(time - self._rounding, self._clear)
        at = bisect_right(state.starts, after)
        for i, change in self._changes[number]:
            if change > 0:
                at = _lowest(state.held[i], self._limits[rank][i] - change + _ROUNDING, at)
        while True:
            start = max(arrival, state.ends[at - 1]) if at else arrival
            if at == len(state.row) or state.starts[at] - start >= time - self._rounding:
                return at, start
            at += 1

    def _send(self, number: int, microbatch: int, end: float) -> None:
        """Note the arrival on other ranks of the result of a pass that ends at ``end``."""
        graph = self._graph
        for fed in graph.feeds[number]:
            comm = fed * graph.microbatches + microbatch
            self._arrival[comm] = max(self._arrival[comm], end + graph.comm_times[fed])
            self._missing[comm] -= 1
            if not self._missing[comm]:
                for member in graph.members[fed]:
                    self._offer(member)


def _lowest(levels: list[float], most: float, least: int) -> int:
    """Return the lowest index, at least ``least``, from which on no level is above ``most``.

    Index i stands for the place before pass i of the row; the amount held there is level i - 1.
    """
    at = len(levels)
    while at > least and (at == 1 or levels[at - 2] <= most):
        at -= 1
    return at
