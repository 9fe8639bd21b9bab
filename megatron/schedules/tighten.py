"""Fill idle time: let a rank do a later pass that is ready while the next one must wait.

A block orders its passes as if every microbatch came one interval after the last. In the warm-up
and the cool-down that is not so, and a rank that follows the order stands idle in front of a pass
whose need is still on its way. Tightening hoists the earliest ready pass into that gap, never
beyond what the rank holds in the plan as it came (arXiv 2405.15362, section 4.2, does so for F, B
and W).
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron.schedules.check import held_changes, peaks_held
from megatron.schedules.needs import Comm, needs, participants
from megatron.schedules.passes import Pass
from megatron.schedules.plan import Plan
from megatron.schedules.timing import Feeds, earliest, unit_cost

Queue = deque[tuple[int, Pass]]
"""Passes of one kind and chunk still to do, each with its place in the original row."""


def tighten(plan: Plan, cost: Callable[[int, Pass], float] = unit_cost) -> Plan:
    """Return ``plan`` with passes hoisted into idle time.

    The peaks of activations and exponentials that a rank holds do not grow, nor do those of the
    embeddings on the first stage; the others may look up p microbatches further ahead. The time of
    the plan under ``cost`` does not grow either: where hoisting does not pay, the plan comes back
    as it was.

    Args:
        plan: a checked plan.
        cost: assumed duration of a pass on a rank.
    """
    rows = _Hoist(plan, cost).rows()
    if rows is None:
        return plan
    hoisted = replace(plan, rows=rows)
    return hoisted if _makespan(hoisted, cost) < _makespan(plan, cost) else plan


def _makespan(plan: Plan, cost: Callable[[int, Pass], float]) -> float:
    timing = earliest(plan, cost)
    assert not timing.stuck
    return max(row[-1] for row in timing.ends)


class _Hoist:
    """List scheduling: whenever a rank is free it takes the first ready pass of its row.

    Passes of one kind and chunk keep their order, so a rank chooses among a handful.
    """

    def __init__(self, plan: Plan, cost: Callable[[int, Pass], float]) -> None:
        self._plan = plan
        self._cost = cost
        self._limits = [_limits(plan, rank) for rank in range(plan.ranks)]
        self._held = [[0, 0, 0] for _ in plan.rows]
        self._free = [0.0] * plan.ranks
        self._queues = [_queues(row) for row in plan.rows]
        self._ends: list[dict[Pass, float]] = [{} for _ in plan.rows]
        self._ready: dict[Comm, float] = {}
        self._feeds = Feeds(plan)
        self._events = [(0.0, rank) for rank in range(plan.ranks)]

    def rows(self) -> tuple[tuple[Pass, ...], ...] | None:
        """Return the new rows, or ``None`` if taking what is ready leads into a dead end."""
        rows: list[list[Pass]] = [[] for _ in self._plan.rows]
        while self._events:
            now, rank = heapq.heappop(self._events)
            item = self._choose(rank, now) if now >= self._free[rank] else None
            if item is not None:
                rows[rank].append(item)
                self._run(rank, item, now)
        if any(len(new) < len(old) for new, old in zip(rows, self._plan.rows, strict=True)):
            return None
        return tuple(map(tuple, rows))

    def _choose(self, rank: int, now: float) -> Pass | None:
        """Take the ready pass that came first in the original row off its queue."""
        best: Queue | None = None
        for queue in self._queues[rank]:
            if queue and (best is None or queue[0] < best[0]) and self._may(rank, queue[0][1], now):
                best = queue
        return best.popleft()[1] if best is not None else None

    def _may(self, rank: int, item: Pass, now: float) -> bool:
        changes = held_changes(self._plan, item)
        for held, change, limit in zip(self._held[rank], changes, self._limits[rank], strict=True):
            if change > 0 and held + change > limit:
                return False
        for need in needs(self._plan, rank, item):
            if isinstance(need, Comm):
                if self._ready.get(need, float("inf")) > now:
                    return False
            elif need not in self._ends[rank]:
                return False
        return True

    def _run(self, rank: int, item: Pass, now: float) -> None:
        end = now + self._cost(rank, item)
        self._ends[rank][item] = end
        self._free[rank] = end
        for i, change in enumerate(held_changes(self._plan, item)):
            self._held[rank][i] += change
        heapq.heappush(self._events, (end, rank))
        for comm in self._feeds.finished(rank, item, end):
            self._ready[comm] = self._feeds.latest.pop(comm)
            # Whoever is idle at that moment looks again; whoever works will look when it is free.
            for other in participants(self._plan, comm):
                heapq.heappush(self._events, (self._ready[comm], other))


def _limits(plan: Plan, rank: int) -> tuple[int, int, int]:
    """Return how much of what ``held_changes`` counts a rank may hold.

    Only the first stage keeps embeddings. The other ranks must look them up that much earlier
    before their own F as it comes later, up to one microbatch a rank.
    """
    activations, exponentials, embeddings = peaks_held(plan, rank)
    ahead = 0 if rank == plan.stages[0][0] else plan.ranks
    return activations, exponentials, embeddings + ahead


def _queues(row: Sequence[Pass]) -> list[Queue]:
    queues: dict[tuple[str, int], Queue] = {}
    for place, item in enumerate(row):
        queues.setdefault((item.kind, item.chunk), deque()).append((place, item))
    return list(queues.values())
