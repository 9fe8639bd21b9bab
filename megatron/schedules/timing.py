"""When every pass of a plan starts if each rank works as soon as it can and communication is free.

This is the plan's own notion of time: ``check`` uses it to prove that nothing deadlocks, ``lower``
to put communication into one order that all ranks agree on.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from megatron.schedules.needs import Comm, needs, sources
from megatron.schedules.passes import Pass, PassKind
from megatron.schedules.plan import Plan

UNIT_COSTS: Final[Mapping[PassKind, float]] = {
    "F": 1.0, "B": 2.0, "W": 1.0, "S": 0.5, "T": 0.5, "IF": 0.05, "IB": 0.05
}  # fmt: skip
"""Durations assumed where nothing was measured; only their order matters."""


@dataclass(frozen=True)
class Timing:
    """Earliest times of a plan.

    Attributes:
        starts: for every rank, the start of each pass of its row.
        ends: for every rank, the end of each pass of its row.
        ready: for every communication, the time at which its last source has ended. In an order in
            which each follows all that it depends on, also where times are equal.
        stuck: for every rank that cannot finish its row, the index of the pass it stops at.
    """

    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    ready: Mapping[Comm, float]
    stuck: Mapping[int, int]


def unit_cost(_rank: int, item: Pass) -> float:
    """Return the assumed duration of ``item``."""
    return UNIT_COSTS[item.kind]


def earliest(plan: Plan, cost: Callable[[int, Pass], float] = unit_cost) -> Timing:
    """Run ``plan`` on paper: every rank takes its passes in order, as soon as their needs are met.

    Linear in the number of passes: a rank that must wait sleeps until that communication is ready.

    Args:
        plan: any plan, also one that deadlocks (see ``Timing.stuck``).
        cost: duration of a pass on a rank.
    """
    run = _Run(plan, cost)
    awake = list(range(plan.ranks))
    while awake:
        awake.extend(run.advance(awake.pop()))
    starts, ends = run.starts, run.ends
    stuck = {r: len(ends[r]) for r in range(plan.ranks) if len(ends[r]) < len(plan.rows[r])}
    return Timing(tuple(map(tuple, starts)), tuple(map(tuple, ends)), run.ready, stuck)


class _Run:
    """The state of one walk over a plan."""

    def __init__(self, plan: Plan, cost: Callable[[int, Pass], float]) -> None:
        self.plan = plan
        self.cost = cost
        self.starts: list[list[float]] = [[] for _ in plan.rows]
        self.ends: list[list[float]] = [[] for _ in plan.rows]
        self.ready: dict[Comm, float] = {}
        self._done: list[set[Pass]] = [set() for _ in plan.rows]
        self._sleepers: dict[Comm, list[int]] = defaultdict(list)
        self._feeds = Feeds(plan)

    def advance(self, rank: int) -> list[int]:
        """Let ``rank`` go on until it must wait; return the ranks that this wakes up."""
        row, starts, ends = self.plan.rows[rank], self.starts[rank], self.ends[rank]
        woken: list[int] = []
        while len(ends) < len(row):
            item = row[len(ends)]
            start = self._earliest_start(rank, item, ends[-1] if ends else 0.0)
            if start is None:
                break
            end = start + self.cost(rank, item)
            starts.append(start)
            ends.append(end)
            self._done[rank].add(item)
            for comm in self._feeds.finished(rank, item, end):
                self.ready[comm] = self._feeds.latest.pop(comm)
                woken.extend(self._sleepers.pop(comm, ()))
        return woken

    def _earliest_start(self, rank: int, item: Pass, free: float) -> float | None:
        start = free
        for need in needs(self.plan, rank, item):
            if isinstance(need, Comm):
                ready = self.ready.get(need)
                if ready is None:
                    self._sleepers[need].append(rank)
                    return None
                start = max(start, ready)
            elif need not in self._done[rank]:
                return None  # it stands later in the same row, or nowhere: stuck for good
        return start


class Feeds:
    """Counts, for every communication that somebody needs, the sources that are still to end."""

    def __init__(self, plan: Plan) -> None:
        # No set: its order differs from process to process, and the ranks must agree.
        self.latest: dict[Comm, float] = {
            need: 0.0
            for rank, row in enumerate(plan.rows)
            for item in row
            for need in needs(plan, rank, item)
            if isinstance(need, Comm)
        }
        self._missing: dict[Comm, int] = {}
        self._fed_by: dict[tuple[int, Pass], list[Comm]] = defaultdict(list)
        for comm in self.latest:
            feeding = sources(plan, comm)
            self._missing[comm] = len(feeding)
            for source in feeding:
                self._fed_by[source].append(comm)

    def finished(self, rank: int, item: Pass, end: float) -> list[Comm]:
        """Note the end of a pass; return the communications whose last source it was."""
        complete = []
        for comm in self._fed_by.get((rank, item), ()):
            self.latest[comm] = max(self.latest[comm], end)
            self._missing[comm] -= 1
            if not self._missing[comm]:
                complete.append(comm)
        return complete
