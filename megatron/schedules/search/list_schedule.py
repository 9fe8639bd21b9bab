"""List scheduling: a rank that is free takes the best pass that is ready.

The search starts from a ``base``: rows that are known to run and to fit into memory. A pass may
overtake others of its base row only if the rest of the row still fits into memory afterwards. So
the search never gets stuck.

Passes have keys, and the smallest key goes first. A ready pass does not start if it would delay a
pass with a smaller key that is about to become ready. A batch system works in the same way when it
fills the gap before a waiting job without delaying the job. ``slack`` loosens this rule.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final

from megatron.schedules.graph import Graph
from megatron.schedules.held import Held

Rows = list[list[int]]
"""For every rank its passes in order, as numbers of ``Graph``."""

_EPSILON: Final = 1e-9
"""Tolerance: absolute for memory, a share of the longest pass for time (whose unit may be seconds
or FLOPs)."""
_NOTHING: Final = -1


@dataclass(frozen=True)
class Problem:
    """The passes to schedule, with the limits of memory.

    Attributes:
        graph: the passes, their needs and durations.
        changes: for every pass number, its change of what the rank holds.
        limits: for every rank, the most it may hold.
    """

    graph: Graph
    changes: Sequence[Held]
    limits: Sequence[Held]

    def reversed(self) -> "Problem":
        """Return the problem with time running backwards."""
        changes = [Held(*(-change for change in held)) for held in self.changes]
        return Problem(self.graph.reversed(), changes, self.limits)


@dataclass(frozen=True)
class Rule:
    """How a rank chooses its next pass.

    Attributes:
        slack: share of its duration by which a pass may delay a pass with a smaller key; 0 allows
            no delay, and 1 is fully greedy.
        filler_slack: the same for passes that no other pass waits for (``Graph.fillers``);
            ``None`` for the value of ``slack``.
        warm_up_slack: the same for all passes before the rank's first B; ``None`` for the values
            that hold afterwards.
        keys: for every pass number and microbatch, its key. Without keys the order of the base
            decides, and ``planned`` gives the expected start of a pass whose needs have no known
            end yet.
        planned: for every pass number and microbatch, its start in the base.
        begin: for every rank, the time at which it begins; all begin at 0 if empty.
        idle: for every rank, how long it may idle after its first pass. Once waiting for a pass
            would take longer, the rank starts a filler and lets that pass be late; all idle for as
            long as they like if empty.
    """

    slack: float = 0.0
    filler_slack: float | None = None
    warm_up_slack: float | None = None
    keys: Sequence[Sequence[float]] = ()
    planned: Sequence[Sequence[float]] = ()
    begin: Sequence[float] = ()
    idle: Sequence[float] = ()


def list_schedule(problem: Problem, base: Rows, rule: Rule) -> Rows:
    """Return new rows of the passes of ``base``; passes of one kind and chunk keep their order.

    Args:
        problem: the passes and the limits of memory.
        base: rows that run and keep the limits.
        rule: how a rank chooses its next pass.
    """
    run = _Run(problem, base, rule)
    while run.events:
        now, rank = heapq.heappop(run.events)
        if now >= run.free[rank]:
            run.decide(rank, now)
    assert list(map(len, run.rows)) == list(map(len, base)), "the base does not run"
    return run.rows


@dataclass
class _Rank:
    """The state of one rank."""

    own: list[int]
    base: list[int]
    head: int = 0
    warming_up: bool = True
    idled: float = 0.0
    held: list[float] = field(default_factory=lambda: [0.0] * len(Held._fields))


class _Run:
    """The state of one list scheduling."""

    def __init__(self, problem: Problem, base: Rows, rule: Rule) -> None:
        graph = problem.graph
        m = graph.microbatches
        self.rows: Rows = [[] for _ in base]
        self.free = list(rule.begin) or [0.0] * len(base)
        self.events = sorted((time, rank) for rank, time in enumerate(self.free))
        self._graph, self._rule, self._limits = graph, rule, problem.limits
        self._keys = rule.keys or rule.planned
        self._moment = _EPSILON * max(graph.times, default=0.0)
        self._ranks = [_Rank([], row) for row in base]
        for number, rank in enumerate(graph.ranks):
            self._ranks[rank].own.append(number)
        self._following = [0] * len(graph.passes)
        filler_slack = rule.slack if rule.filler_slack is None else rule.filler_slack
        slacks = [filler_slack if filler else rule.slack for filler in graph.fillers]
        self._later = [t * (1 - s) for t, s in zip(graph.times, slacks, strict=True)]
        warm_up_slack = rule.warm_up_slack
        self._warm_up = (
            self._later
            if warm_up_slack is None
            else [time * (1 - warm_up_slack) for time in graph.times]
        )
        """For each pass, its duration less the slack, in the warm-up: a pass with a smaller key
        delays it if it arrives within this time. ``_later`` holds the same for afterwards."""
        self._all_changes = problem.changes
        self._changes = [[(i, c) for i, c in enumerate(all_) if c] for all_ in problem.changes]
        self._takes = [[(i, c) for i, c in own if c > 0] for own in self._changes]
        self._arrival = [0.0] * (m * len(graph.comms))
        self._missing = [count for count in graph.sources for _ in range(m)]

    def decide(self, rank: int, now: float) -> None:
        """Let ``rank``, which is free, start a pass or wait."""
        number, wake = self._choose(rank, now)
        if number != _NOTHING:
            self._start(rank, number, now)
        elif wake < inf:
            heapq.heappush(self.events, (wake, rank))

    def _choose(self, rank: int, now: float) -> tuple[int, float]:
        """Return the number of the pass to start; or ``_NOTHING`` and the time to look again."""
        state = self._ranks[rank]
        bound = self._bound(rank)
        if bound != _NOTHING:
            arrival = self._arrives(bound)
            return (bound if arrival <= now else _NOTHING), arrival
        if not self._rule.keys and state.head < len(state.base):
            head = state.base[state.head] // self._graph.microbatches
            if self._arrives(head) <= now:
                return head, now
        queue, coming = self._queue(state, now)
        urgent = inf
        for _, number, arrival in queue:
            if arrival > now:
                urgent = min(urgent, arrival)
                continue
            end = now + (self._warm_up if state.warming_up else self._later)[number]
            # Others that wait at once for this rank must not make it wait for them in turn.
            harmless = end <= urgent + self._moment or number in self._graph.followed_by
            if not harmless and self._graph.fillers[number]:
                harmless = self._has_idled(rank, urgent - now)
            if harmless and self._fits(state, number, self._limits[rank]):
                return number, now
        return _NOTHING, coming

    def _has_idled(self, rank: int, wait: float) -> bool:
        """Whether ``rank`` would idle for longer than it may if it idled for ``wait`` more."""
        allowed = self._rule.idle
        return bool(allowed) and self._ranks[rank].idled + wait > allowed[rank] + self._moment

    def _bound(self, rank: int) -> int:
        """Return the pass that must follow the last one of ``rank``, or ``_NOTHING``."""
        if not self._graph.followed_by or not self.rows[rank]:
            return _NOTHING
        last = self.rows[rank][-1] // self._graph.microbatches
        return self._graph.followed_by.get(last, _NOTHING)

    def _queue(self, state: _Rank, now: float) -> tuple[list[tuple[float, int, float]], float]:
        """Return (key, number, expected arrival) of what remains, and the next sure arrival.

        An arrival is the time at which all needs of a pass are met.
        """
        queue = []
        coming = inf
        for number in state.own:
            microbatch = self._following[number]
            if microbatch == self._graph.microbatches:
                continue
            arrival = self._arrives(number)
            if now < arrival < coming:
                coming = arrival
            if arrival == inf and not self._rule.keys:
                arrival = max(now + self._moment, self._rule.planned[number][microbatch])
            queue.append((self._keys[number][microbatch], number, arrival))
        queue.sort()
        return queue, coming

    def _arrives(self, number: int) -> float:
        """Return when the next pass of ``number`` may start, or infinity if it is not known."""
        graph, m = self._graph, self._graph.microbatches
        microbatch = self._following[number]
        for own in graph.own_needs[number]:
            if self._following[own] <= microbatch:
                return inf
        arrival = 0.0
        for need in graph.comm_needs[number]:
            comm = need * m + microbatch
            if self._missing[comm]:
                return inf
            if self._arrival[comm] > arrival:
                arrival = self._arrival[comm]
        return arrival

    def _fits(self, state: _Rank, number: int, limits: Held) -> bool:
        """Whether the rest of the base row still fits into memory if ``number`` goes next."""
        m, following = self._graph.microbatches, self._following
        target = number * m + following[number]
        for i, change in self._takes[number]:
            room = limits[i] - state.held[i] - change + _EPSILON
            at = state.head
            while room >= 0 and state.base[at] != target:
                other, microbatch = divmod(state.base[at], m)
                if microbatch >= following[other]:
                    room -= self._all_changes[other][i]
                at += 1
            if room < 0:
                return False
        return True

    def _start(self, rank: int, number: int, now: float) -> None:
        graph, m, following = self._graph, self._graph.microbatches, self._following
        state = self._ranks[rank]
        microbatch = following[number]
        following[number] += 1
        if self.rows[rank]:
            state.idled += now - self.free[rank]
        self.rows[rank].append(number * m + microbatch)
        base, head = state.base, state.head
        while head < len(base) and base[head] % m < following[base[head] // m]:
            head += 1
        state.head = head
        state.warming_up = state.warming_up and graph.passes[number].kind != "B"
        for i, change in self._changes[number]:
            state.held[i] += change
        self.free[rank] = end = now + graph.times[number]
        heapq.heappush(self.events, (end, rank))
        for fed in graph.feeds[number]:
            comm = fed * m + microbatch
            self._arrival[comm] = max(self._arrival[comm], end + graph.comm_times[fed])
            self._missing[comm] -= 1
            if not self._missing[comm]:
                self._announce(graph.members[fed], self._arrival[comm], now)

    def _announce(self, members: Sequence[int], arrival: float, now: float) -> None:
        """Let the idle participants of a communication look for a pass again when it is done."""
        for rank in members:
            if self.free[rank] <= now:
                heapq.heappush(self.events, (arrival, rank))
