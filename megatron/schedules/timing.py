"""The start of every pass of a plan if each rank works as soon as it can.

``check`` uses these times to prove that a plan does not deadlock, and ``lower`` uses them to put
all communications into one order for all ranks.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf

from megatron.schedules.costs import UNIT_COSTS, Costs
from megatron.schedules.graph import Graph
from megatron.schedules.needs import Comm
from megatron.schedules.plan import Plan


@dataclass(frozen=True)
class Timing:
    """Earliest times of a plan.

    Attributes:
        starts: for every rank, the start of each pass of its row.
        ends: for every rank, the end of each pass of its row.
        ready: for every communication, the time at which its last source has ended. The
            communications are in topological order: each follows all communications that it depends
            on, even if their times are equal.
        stuck: for every rank that cannot finish its row, the index of the pass where it stops.
    """

    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    ready: Mapping[Comm, float]
    stuck: Mapping[int, int]

    @property
    def end(self) -> float:
        """End of the last pass."""
        return max((row[-1] for row in self.ends if row), default=0.0)

    @property
    def working(self) -> "list[Working]":
        """For every rank, the time in which it works."""
        return [working(*times) for times in zip(self.starts, self.ends, strict=True)]


Working = tuple[float, float] | None
"""First start and last end of a rank's passes that take time; ``None`` if no pass takes time."""


def working(starts: Sequence[float], ends: Sequence[float]) -> Working:
    """Return the time in which a rank works, from the times of its passes in order."""
    indices = range(len(starts))
    first = next((starts[i] for i in indices if ends[i] > starts[i]), None)
    if first is None:
        return None
    return first, next(ends[i] for i in reversed(indices) if ends[i] > starts[i])


def longest_span(ranks: Iterable[Working]) -> float:
    """Return the longest time between a rank's first start and its last end.

    Bubble rates are shares of this span (arXiv 2401.10241, section 5.3).
    """
    return max((times[1] - times[0] for times in ranks if times), default=0.0)


def earliest(plan: Plan, costs: Costs = UNIT_COSTS) -> Timing:
    """Compute the earliest times: each rank runs its passes in order, each when its needs are met.

    Communications take their time and never wait for one another.

    Args:
        plan: any plan with the right passes; it may deadlock (see ``Timing.stuck``).
        costs: durations.
    """
    graph, m = Graph(plan, costs), plan.microbatches
    run = walk(graph, graph.rows(plan), graph.pairs(plan))
    ready = {graph.comms[c // m]._replace(microbatch=c % m): run.latest[c] for c in run.complete}
    return Timing(tuple(map(tuple, run.starts)), tuple(map(tuple, run.ends)), ready, run.stuck)


def earliest_end(plan: Plan, costs: Costs = UNIT_COSTS) -> float:
    """Return the end of the last pass in ``earliest``, without all other times."""
    graph = Graph(plan, costs)
    return walk(graph, graph.rows(plan), graph.pairs(plan)).end


def walk(
    graph: Graph, rows: Sequence[Sequence[int]], pairs: Sequence[Collection[int]] = ()
) -> "Walk":
    """Compute the times of ``earliest`` from rows of numbered passes.

    Args:
        graph: the passes.
        rows: for every rank the numbers of its passes, in order.
        pairs: for every rank the numbers of the first passes of its pairs; empty: the plan has no
            pairs. A pair starts when the needs of both passes are met, and both end together.

    The effort is linear in the number of passes: a rank that waits for a communication is not
    looked at again before this communication is ready.
    """
    run = Walk(graph, rows, pairs)
    awake = list(range(len(rows)))
    while awake:
        awake.extend(run.advance(awake.pop()))
    return run


@dataclass
class Deadline:
    """When a walk may end early: its plan is then known to take too long.

    Attributes:
        limit: the latest end.
        left: for every rank, the time of its passes that are still to come, or less.
    """

    limit: float
    left: list[float]


class Walk:
    """The state of one walk over a plan.

    Attributes:
        starts: for every rank, the start of each pass so far.
        ends: for every rank, the end of each pass so far.
        latest: for every communication and microbatch, the end of its latest source so far.
        complete: the communications whose sources have all ended, in the order of the last source's
            end.
        is_late: whether a rank with pairs cannot keep the deadline; it has stopped then.
    """

    def __init__(
        self,
        graph: Graph,
        rows: Sequence[Sequence[int]],
        pairs: Sequence[Collection[int]] = (),
        deadline: Deadline | None = None,
    ) -> None:
        m = graph.microbatches
        self.starts: list[list[float]] = [[] for _ in rows]
        self.ends: list[list[float]] = [[] for _ in rows]
        self.latest = [0.0] * (m * len(graph.comms))
        self.complete: list[int] = []
        self.is_late = False
        self._deadline = Deadline(inf, [0.0] * len(rows)) if deadline is None else deadline
        self._graph = graph
        self._rows = rows
        self._pairs = pairs or [()] * len(rows)
        self._in_steps = [bool(own or graph.waits_after) for own in self._pairs]
        self._done = bytearray(m * len(graph.passes))
        self._missing = [count for count in graph.sources for _ in range(m)]
        self._sleepers: dict[int, list[int]] = {}
        self._needs = [
            (
                [(comm * m, graph.comm_times[comm]) for comm in comms],
                [own * m for own in owns],
                time,
            )
            for comms, owns, time in zip(
                graph.comm_needs, graph.own_needs, graph.times, strict=True
            )
        ]
        """For every pass: the first number of each communication that it needs, with its duration;
        the first number of each own pass that it needs; and its duration."""

    @property
    def end(self) -> float:
        """End of the last pass so far."""
        return max((ends[-1] for ends in self.ends if ends), default=0.0)

    @property
    def stuck(self) -> dict[int, int]:
        """For every rank that has not finished its row, the index of its next pass."""
        lengths = [(len(ends), len(row)) for ends, row in zip(self.ends, self._rows, strict=True)]
        return {rank: done for rank, (done, length) in enumerate(lengths) if done < length}

    def can_run(self, rank: int, item: int) -> bool:
        """Return whether ``item`` could be the next pass of ``rank``."""
        number, microbatch = divmod(item, self._graph.microbatches)
        comm_needs, own_needs, _ = self._needs[number]
        comms = [base + microbatch for base, _ in comm_needs]
        comms += [comm for comm, _ in self._blocking(rank)]
        return not any(self._missing[comm] for comm in comms) and all(
            self._done[base + microbatch] for base in own_needs
        )

    def advance(self, rank: int) -> list[int]:
        """Let ``rank`` go on until it must wait; return the ranks that can go on afterwards."""
        return self._by_steps(rank) if self._in_steps[rank] else self._by_passes(rank)

    def _by_passes(self, rank: int) -> list[int]:
        """Do as ``advance`` where each pass stands by itself, as in most plans."""
        ends, row, starts = self.ends[rank], self._rows[rank], self.starts[rank]
        m, done, missing, latest = self._graph.microbatches, self._done, self._missing, self.latest
        needs, feeds, complete = self._needs, self._graph.feeds, self.complete
        woken: list[int] = []
        now = ends[-1] if ends else 0.0
        for item in islice(row, len(ends), None):
            number, microbatch = divmod(item, m)
            comm_needs, own_needs, time = needs[number]
            start = now
            for base, taken in comm_needs:
                comm = base + microbatch
                if missing[comm]:
                    self._sleepers.setdefault(comm, []).append(rank)
                    return woken
                arrival = latest[comm] + taken
                if arrival > start:
                    start = arrival
            for base in own_needs:
                if not done[base + microbatch]:
                    return woken  # the need stands later in the row or nowhere: stuck for good
            now = start + time
            starts.append(start)
            ends.append(now)
            done[item] = 1
            for fed in feeds[number]:
                comm = fed * m + microbatch
                if latest[comm] < now:
                    latest[comm] = now
                missing[comm] -= 1
                if not missing[comm]:
                    complete.append(comm)
                    woken += self._sleepers.pop(comm, ())
        return woken

    def _by_steps(self, rank: int) -> list[int]:
        """Do as ``advance`` where passes are in pairs, or wait for communication after them."""
        ends, row, pairs = self.ends[rank], self._rows[rank], self._pairs[rank]
        m, graph, needs = self._graph.microbatches, self._graph, self._needs
        left, limit = self._deadline.left, self._deadline.limit
        woken: list[int] = []
        while (at := len(ends)) < len(row):
            step = [divmod(item, m) for item in row[at : at + 1 + (row[at] in pairs)]]
            start = self._earliest_start(rank, step)
            if start is None:
                break
            first = step[0][0]
            time = needs[first][2] if len(step) == 1 else graph.pair_time(first, step[1][0])
            if start + left[rank] > limit:
                self.is_late = True
                break
            left[rank] -= time
            self._note(rank, step, start, start + time, woken)
        return woken

    def _earliest_start(self, rank: int, step: Sequence[tuple[int, int]]) -> float | None:
        """Return when the next passes of ``rank`` can start, or ``None`` if it must wait."""
        missing, latest, done = self._missing, self.latest, self._done
        start = self.ends[rank][-1] if self.ends[rank] else 0.0
        for comm, taken in self._blocking(rank) if self._graph.waits_after else ():
            if missing[comm]:
                self._sleepers.setdefault(comm, []).append(rank)
                return None
            start = max(start, latest[comm] + taken)
        for number, microbatch in step:
            comm_needs, own_needs, _ = self._needs[number]
            for base, taken in comm_needs:
                comm = base + microbatch
                if missing[comm]:
                    self._sleepers.setdefault(comm, []).append(rank)
                    return None
                arrival = latest[comm] + taken
                if arrival > start:
                    start = arrival
            for base in own_needs:
                if not done[base + microbatch]:
                    return None  # the need stands later in the row or nowhere: stuck for good
        return start

    def _note(
        self,
        rank: int,
        step: Sequence[tuple[int, int]],
        start: float,
        end: float,
        woken: list[int],
    ) -> None:
        """Note passes with their times; add the ranks that can go on afterwards to ``woken``."""
        m, missing, latest = self._graph.microbatches, self._missing, self.latest
        for number, microbatch in step:
            self.starts[rank].append(start)
            self.ends[rank].append(end)
            self._done[number * m + microbatch] = 1
            for fed in self._graph.feeds[number]:
                comm = fed * m + microbatch
                if latest[comm] < end:
                    latest[comm] = end
                missing[comm] -= 1
                if not missing[comm]:
                    self.complete.append(comm)
                    woken += self._sleepers.pop(comm, ())

    def _blocking(self, rank: int) -> list[tuple[int, float]]:
        """Return what ``rank`` waits for right after its last pass, if anything, with its time."""
        if not self.ends[rank]:
            return []
        m = self._graph.microbatches
        number, microbatch = divmod(self._rows[rank][len(self.ends[rank]) - 1], m)
        comm = self._graph.waits_after.get(number)
        return [] if comm is None else [(comm * m + microbatch, self._graph.comm_times[comm])]
