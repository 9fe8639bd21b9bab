"""List scheduling: a rank that is free takes the best pass that is ready.

The search starts from a ``base``: rows that are known to run and to fit into memory. A pass may
overtake others of its base row only if the rest of the row still fits into memory afterwards. So
the search never gets stuck.

Passes have keys, and the smallest key goes first. A ready pass does not start if it would delay a
pass with a smaller key that is about to become ready. A batch system works in the same way when it
fills the gap before a waiting job without delaying that job. ``slack`` allows exceptions from this
rule.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import Final, NamedTuple

from megatron.schedules.graph import Graph
from megatron.schedules.held import Held
from megatron.schedules.search.stock import Stock

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
        changes: for every pass number, how the pass changes the quantities that its rank holds.
        limits: for every rank, the most that it may hold.
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
        slack: a pass may delay a pass with a smaller key by at most this share of its own duration;
            0 allows no delay, and 1 is fully greedy.
        filler_slack: the slack of fillers, the passes that no other pass waits for
            (``Graph.fillers``); ``None`` for the value of ``slack``.
        warm_up_slack: the slack of all passes before the rank's first B; ``None`` for the same
            values as after the first B.
        keys: for every pass number and microbatch, its key. If empty, ``planned`` has the keys, and
            the next pass of the base row starts as soon as it is ready.
        planned: for every pass number and microbatch, its start in the base; needed if ``keys`` is
            empty. It is then also the expected start of a pass whose needs have no known end yet.
        begin: for every rank, the time at which it begins; all begin at 0 if empty.
        idle: for every rank, how long it may idle after its first pass. If waiting for a pass would
            exceed this time, the rank starts a filler instead, and that pass is late. If empty,
            idle time has no limit.
    """

    slack: float = 0.0
    filler_slack: float | None = None
    warm_up_slack: float | None = None
    keys: Sequence[Sequence[float]] = ()
    planned: Sequence[Sequence[float]] = ()
    begin: Sequence[float] = ()
    idle: Sequence[float] = ()


class Listed(NamedTuple):
    """Rows with the times at which list scheduling has placed their passes.

    Attributes:
        rows: for every rank its passes, in their new order.
        starts: the start of every pass in ``rows``.
        ends: the end of every pass in ``rows``.
        is_earliest: whether every pass starts as early as its row and its needs allow. If not, a
            rank has waited, and has then started a pass that was ready before.
    """

    rows: Rows
    starts: list[list[float]]
    ends: list[list[float]]
    is_earliest: bool


def list_schedule(problem: Problem, base: Rows, rule: Rule) -> Rows:
    """Return the passes of ``base`` in a new order; see ``listed``."""
    return listed(problem, base, rule).rows


def listed(problem: Problem, base: Rows, rule: Rule) -> Listed:
    """Return the passes of ``base`` in a new order: ``rule`` chooses what a free rank runs next.

    Passes of one kind and chunk stay in the order of microbatches, and of the slices of a
    microbatch (``Graph.previous``).

    Args:
        problem: the passes and the limits of memory.
        base: rows that run and keep the limits.
        rule: how a rank chooses its next pass.
    """
    run = _Run(problem, base, rule)
    events, free, decide = run.events, run.free, run.decide
    while events:
        now, rank = heappop(events)
        if now >= free[rank]:
            decide(rank, now)
    assert list(map(len, run.rows)) == list(map(len, base)), "the base does not run"
    # Nothing here makes a rank wait after a pass (``Graph.waits_after``).
    is_earliest = run.is_earliest and not problem.graph.waits_after
    return Listed(run.rows, run.starts, run.ends, is_earliest)


class _Rank:
    """The state of one rank.

    Attributes:
        base: its row in the base.
        head: index of the first pass of the base row that is not placed yet; used only without
            keys.
        queue: (key, number) of the next pass of every kind and chunk, sorted.
        warming_up: whether it has placed no B yet.
        idled: how long it has idled since its first pass.
        bound: the pass that must come next, or ``_NOTHING``.
        stocks: every quantity in ``Held`` that a pass of the base row changes.
    """

    __slots__ = ("base", "bound", "head", "idled", "queue", "stocks", "warming_up")

    def __init__(self, base: list[int], stocks: list[Stock]) -> None:
        self.base = base
        self.head = 0
        self.queue: list[tuple[float, int]] = []
        self.warming_up = True
        self.idled = 0.0
        self.bound = _NOTHING
        self.stocks = stocks


class _Run:
    """The state of one list scheduling."""

    def __init__(self, problem: Problem, base: Rows, rule: Rule) -> None:
        graph = problem.graph
        m = graph.microbatches
        self.rows: Rows = [[] for _ in base]
        self.starts: list[list[float]] = [[] for _ in base]
        self.ends: list[list[float]] = [[] for _ in base]
        self.is_earliest = True
        self.free = list(rule.begin) or [0.0] * len(base)
        self.events = sorted((time, rank) for rank, time in enumerate(self.free))
        self._graph, self._rule = graph, rule
        self._microbatches, self._times, self._previous = m, graph.times, graph.previous
        self._guided = bool(rule.keys)
        self._keys = rule.keys or rule.planned
        self._moment = _EPSILON * max(graph.times, default=0.0)
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
        self._changes = [[(i, c) for i, c in enumerate(all_) if c] for all_ in problem.changes]
        self._takes = [[(i, c) for i, c in own if c > 0] for own in self._changes]
        self._ranks = [
            _Rank(row, self._stocks(row, limits))
            for row, limits in zip(base, problem.limits, strict=True)
        ]
        for number, rank in enumerate(graph.ranks):
            insort(self._ranks[rank].queue, (self._keys[number][0], number))
        self._arrivals = [0.0] * (m * len(graph.comms))
        self._missing = [count for count in graph.sources for _ in range(m)]
        self._needs = [
            (owns, [comm * m for comm in comms])
            for owns, comms in zip(graph.own_needs, graph.comm_needs, strict=True)
        ]
        self._feeds = [
            [(fed * m, fed, graph.comm_times[fed]) for fed in feeds] for feeds in graph.feeds
        ]
        self._arrival = [0.0] * len(graph.passes)
        """For each pass, when the needs of the next microbatch are met; infinity if not known."""
        self._waiting_for: list[list[int]] = [[] for _ in graph.passes]
        self._waiting_for_comm: list[list[int]] = [[] for _ in graph.comms]
        for number in range(len(graph.passes)):
            for own in graph.own_needs[number]:
                self._waiting_for[own].append(number)
            if graph.previous:
                self._waiting_for[graph.previous[number][0]].append(number)
            for comm in graph.comm_needs[number]:
                self._waiting_for_comm[comm].append(number)
            self._arrival[number] = self._arrives(number)

    def _stocks(self, row: list[int], limits: Held) -> list[Stock]:
        """Return the stocks of a rank with this row."""
        m, changes = self._graph.microbatches, self._changes
        passes: list[list[tuple[int, int, float]]] = [[] for _ in limits]
        for item in row:
            number, microbatch = divmod(item, m)
            for i, change in changes[number]:
                passes[i].append((number, microbatch, change))
        return [Stock(limit + _EPSILON, own) for limit, own in zip(limits, passes, strict=True)]

    def decide(self, rank: int, now: float) -> None:
        """Let ``rank``, which is free, start a pass or wait."""
        state, arrival = self._ranks[rank], self._arrival
        if state.bound != _NOTHING:
            wake = arrival[state.bound]
            number = state.bound if wake <= now else _NOTHING
        else:
            number, wake = self._choose(state, rank, now)
        if number != _NOTHING:
            self._start(state, rank, number, now)
        elif wake < inf:
            heappush(self.events, (wake, rank))

    def _choose(self, state: _Rank, rank: int, now: float) -> tuple[int, float]:
        """Return the number of the pass to start, or ``_NOTHING`` with the time to look again."""
        arrivals, guided = self._arrival, self._guided
        if not guided and state.head < len(state.base):
            head = state.base[state.head] // self._microbatches
            if arrivals[head] <= now:
                return head, now
        later = self._warm_up if state.warming_up else self._later
        moment = self._moment
        urgent = coming = inf
        for key, number in state.queue:
            arrival = arrivals[number]
            if arrival <= now:
                if (
                    now + later[number] <= urgent + moment
                    or self._may_delay(number, rank, urgent - now)
                ) and self._fits(state, number):
                    return number, now
                continue
            if arrival < coming:
                coming = arrival
            if arrival == inf and not guided:
                arrival = (
                    key if key > now + moment else now + moment
                )  # the key is its planned start
            if arrival < urgent:
                urgent = arrival
        return _NOTHING, coming

    def _may_delay(self, number: int, rank: int, wait: float) -> bool:
        """Whether a pass may delay a more urgent pass, for which ``rank`` would ``wait``."""
        if number in self._graph.followed_by:
            return True  # others wait for this rank already, so it must not wait for them
        allowed = self._rule.idle
        return (
            bool(allowed)
            and self._graph.fillers[number]
            and self._ranks[rank].idled + wait > allowed[rank] + self._moment
        )

    def _fits(self, state: _Rank, number: int) -> bool:
        """Whether the rest of the base row still fits into memory if ``number`` goes next."""
        for i, change in self._takes[number]:
            if not state.stocks[i].fits(number, change, self._following):
                return False
        return True

    def _arrives(self, number: int) -> float:
        """Return when the next pass of ``number`` may start, or infinity if it is not known."""
        following, missing, ends = self._following, self._missing, self._arrivals
        microbatch = following[number]
        if microbatch == self._microbatches:
            return inf
        owns, comms = self._needs[number]
        for own in owns:
            if following[own] <= microbatch:
                return inf
        if self._previous:
            before, earlier = self._previous[number]
            if following[before] <= microbatch - earlier:
                return inf
        arrival = 0.0
        for base in comms:
            comm = base + microbatch
            if missing[comm]:
                return inf
            end = ends[comm]
            if end > arrival:
                arrival = end
        return arrival

    def _start(self, state: _Rank, rank: int, number: int, now: float) -> None:
        following, row, arrival = self._following, self.rows[rank], self._arrival
        ends, missing = self._arrivals, self._missing
        microbatch = following[number]
        following[number] = microbatch + 1
        if row:
            state.idled += now - self.free[rank]
        if now > arrival[number] and not (row and now == self.free[rank]):
            self.is_earliest = False
        row.append(number * self._microbatches + microbatch)
        self.starts[rank].append(now)
        self._advance(state, number, microbatch)
        for i, change in self._changes[number]:
            state.stocks[i].room -= change
        arrival[number] = self._arrives(number)
        for user in self._waiting_for[number]:
            if arrival[user] == inf:
                arrival[user] = self._arrives(user)
        self.free[rank] = end = now + self._times[number]
        self.ends[rank].append(end)
        heappush(self.events, (end, rank))
        for base, fed, time in self._feeds[number]:
            comm = base + microbatch
            arrives = end + time
            if arrives > ends[comm]:
                ends[comm] = arrives
            missing[comm] -= 1
            if not missing[comm]:
                self._announce(fed, microbatch, now)

    def _advance(self, state: _Rank, number: int, microbatch: int) -> None:
        """Note in the state of a rank that it starts a pass."""
        m, following = self._microbatches, self._following
        keys, queue = self._keys[number], state.queue
        del queue[bisect_left(queue, (keys[microbatch], number))]
        if microbatch + 1 < m:
            insort(queue, (keys[microbatch + 1], number))
        if not self._guided:
            base, head, length = state.base, state.head, len(state.base)
            while head < length:
                other, index = divmod(base[head], m)
                if index >= following[other]:
                    break
                head += 1
            state.head = head
        if state.warming_up and self._graph.passes[number].kind == "B":
            state.warming_up = False
        if self._graph.followed_by:
            state.bound = self._graph.followed_by.get(number, _NOTHING)

    def _announce(self, fed: int, microbatch: int, now: float) -> None:
        """Let the idle participants of a communication look for a pass again when it is done."""
        arrival, free = self._arrivals[fed * self._microbatches + microbatch], self.free
        for user in self._waiting_for_comm[fed]:
            if self._following[user] == microbatch:
                self._arrival[user] = self._arrives(user)
        for rank in self._graph.members[fed]:
            if free[rank] <= now:
                heappush(self.events, (arrival, rank))
