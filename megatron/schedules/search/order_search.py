"""The order of the passes as a scheduling problem for OR-Tools' CP-SAT; ``optimal`` solves it.

Start times are whole ticks. Passes of one kind and chunk run in the order of their microbatches.
This excludes no better schedule: in any schedule, the k-th pass of a kind and chunk to start can be
given to microbatch k. Ranks are then as busy and hold as much as before, and all needs are met in
time. For example, if every B starts after the F of its own microbatch ends, then the k-th B to
start does so after the k-th F to end.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import floor
from typing import TYPE_CHECKING, Final, NamedTuple

from megatron.schedules.check import check
from megatron.schedules.costs import Costs
from megatron.schedules.graph import Graph
from megatron.schedules.held import Held, held_changes
from megatron.schedules.plan import Plan
from megatron.schedules.timing import Timing, earliest

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

_PARTS: Final = 10**6
"""CP-SAT counts whole parts of an activation: B frees some of them and W frees the others."""
_EPSILON: Final = 1e-3
"""Parts that rounding errors in floating point may lose."""


class _Holding(NamedTuple):
    """The numbers of a pass that takes memory and of the pass that frees it, and how many parts."""

    take: int
    release: int
    parts: int


class OrderSearch:
    """The CP-SAT model: it has a start time for every pass, and its solution becomes a plan.

    Memory is unlimited until ``limit_memory`` is called.
    """

    def __init__(
        self, model: "cp_model.CpModel", known: Plan, ticks: Costs, begins: Sequence[int]
    ) -> None:
        """Build the model.

        Args:
            model: an empty model; the objective is added to it too.
            known: a checked plan. The search starts from it and never returns a longer one.
            ticks: durations in whole ticks.
            begins: for every rank, the time from which its span counts.
        """
        self._model = model
        self._known = known
        self._graph = Graph(known, ticks)
        self._times = [int(time) for time in self._graph.times]
        self._orders: dict[tuple[int, int, int, int], cp_model.BoolVarT] = {}
        # No plan takes less than the busiest rank has to do.
        self._work = known.microbatches * max(
            sum(self._times[n] for n in self._own(rank)) for rank in range(known.ranks)
        )
        timing = earliest(known, ticks)
        lasts = [int(times[1]) if times else 0 for times in timing.working]
        self._longest = longest = max(
            last - begin for last, begin in zip(lasts, begins, strict=True)
        )
        # Passes that take no time may stand at the very end, behind communications that do.
        horizon = longest + max(begins) + int(sum(self._graph.comm_times))
        self._starts = [
            [model.new_int_var(0, horizon, "") for _ in range(known.microbatches)]
            for _ in self._times
        ]
        self._hints = self._known_starts(timing)
        for variables, values in zip(self._starts, self._hints, strict=True):
            for variable, value in zip(variables, values, strict=True):
                model.add_hint(variable, value)
        for number in range(len(self._times)):
            self._order(number)
        total = model.new_int_var(self._work, max(self._work, longest), "")
        for rank, begin in enumerate(begins):
            self._one_at_a_time(rank, total + begin)
        model.minimize(total)

    def limit_memory(self, capacities: Sequence[Held], kept: float) -> None:
        """Limit every rank to its capacity; ``kept`` is as in ``held_changes``."""
        for rank, allowed in enumerate(capacities):
            changes = {
                n: held_changes(self._known, self._graph.passes[n], kept) for n in self._own(rank)
            }
            for i, capacity in enumerate(allowed):
                takes = {self._graph.passes[n].chunk: n for n in changes if changes[n][i] > 0}
                holdings = [
                    _Holding(takes[self._graph.passes[n].chunk], n, _parts(-changes[n][i]))
                    for n in changes
                    if changes[n][i] < 0
                ]
                if capacity < len(takes) * self._graph.microbatches:
                    self._hold(holdings, _parts(capacity))

    def solve(self, solver: "cp_model.CpSolver") -> tuple[Plan, float]:
        """Return the best plan found, and a lower bound of the ticks that any plan takes."""
        if self._longest <= self._work:
            return self._known, self._work  # the known plan cannot be beaten
        status = solver.status_name(solver.solve(self._model))
        assert status in ("OPTIMAL", "FEASIBLE", "UNKNOWN"), f"{status}, but a plan is known"
        plan = self._known if status == "UNKNOWN" else self._plan(solver)
        return plan, max(self._work, solver.best_objective_bound)

    def _plan(self, solver: "cp_model.CpSolver") -> Plan:
        """Return the checked plan of the solution that ``solver`` has found.

        Several passes may start at once if they take no time. They are sorted by microbatch, and
        within a microbatch as in the known plan.
        """
        m, rows = self._graph.microbatches, []
        for rank, row in enumerate(self._known.rows):
            placed = []
            for place, item in enumerate(self._graph.row(rank, row)):
                number, i = divmod(item, m)
                start = solver.value(self._starts[number][i])
                placed.append((start, start + self._times[number], i, place))
            rows.append(tuple(row[place] for *_, place in sorted(placed)))
        plan = replace(self._known, rows=tuple(rows))
        check(plan)
        return plan

    def _own(self, rank: int) -> list[int]:
        return [number for number, owner in enumerate(self._graph.ranks) if owner == rank]

    def _end(self, number: int, microbatch: int) -> "cp_model.LinearExprT":
        return self._starts[number][microbatch] + self._times[number]

    def _known_starts(self, timing: Timing) -> list[list[int]]:
        """Return the known plan's starts of every pass, in the order of microbatches."""
        m = self._graph.microbatches
        known: list[list[int]] = [[] for _ in self._starts]
        for rank, row in enumerate(self._known.rows):
            for item, start in zip(self._graph.row(rank, row), timing.starts[rank], strict=True):
                known[item // m].append(int(start))
        return [sorted(starts) for starts in known]

    def _order(self, number: int) -> None:
        """Put a pass after its needs, and after the same pass of the previous microbatch."""
        graph = self._graph
        lags = [(own, 0) for own in graph.own_needs[number]]
        for comm in graph.comm_needs[number]:
            feeders = [n for n, fed in enumerate(graph.feeds) if comm in fed]
            lags += [(feeder, int(graph.comm_times[comm])) for feeder in feeders]
        for i, start in enumerate(self._starts[number]):
            if i:
                self._model.add(start >= self._end(number, i - 1))
            for needed, lag in lags:
                self._model.add(start >= self._end(needed, i) + lag)

    def _one_at_a_time(self, rank: int, finish: "cp_model.LinearExprT") -> None:
        """Let the passes of a rank not overlap, and all that take time end before ``finish``."""
        model, numbers = self._model, self._own(rank)
        model.add_no_overlap(
            [
                model.new_fixed_size_interval_var(start, self._times[number], "")
                for number in numbers
                for start in self._starts[number]
            ]
        )
        for number in numbers:
            if self._times[number]:
                model.add(self._end(number, self._graph.microbatches - 1) <= finish)

    def _hold(self, holdings: Sequence[_Holding], capacity: int) -> None:
        """Limit one kind of memory of one rank."""
        m = self._graph.microbatches
        if len(holdings) == 1:
            [(take, release, parts)] = holdings
            for i in range(capacity // parts, m):
                self._model.add(self._starts[take][i] >= self._end(release, i - capacity // parts))
            return
        for number in dict.fromkeys(holding.take for holding in holdings):
            for i in range(m):
                held = [term for holding in holdings for term in self._held(holding, number, i)]
                own = sum(holding.parts for holding in holdings if holding.take == number)
                self._model.add(sum(held) <= capacity - own * (i + 1))

    def _held(self, holding: _Holding, number: int, i: int) -> "list[cp_model.LinearExpr]":
        """Return the parts of a holding that are held when pass ``number`` of ``i`` has started.

        Pass ``number`` takes memory; its own parts are left out. At this time no chunk has released
        memory of microbatch ``i`` or a later one, because the backwards of a microbatch come after
        all its forwards.
        """
        take, release, parts = holding
        m = 0 if take == number else self._graph.microbatches
        taken = [parts * self._before(take, j, number, i) for j in range(m)]
        return taken + [-parts * self._before(release, j, number, i) for j in range(i)]

    def _before(self, first: int, i: int, second: int, j: int) -> "cp_model.BoolVarT":
        """Return the variable that says which of two passes of a rank comes first.

        A cumulative constraint over intervals of variable length would be correct too, but CP-SAT
        proves next to nothing with it.
        """
        known = self._orders.get((first, i, second, j))
        if known is None:
            known = self._model.new_bool_var("")
            self._model.add(self._starts[second][j] >= self._end(first, i)).only_enforce_if(known)
            self._model.add(self._starts[first][i] >= self._end(second, j)).only_enforce_if(~known)
            end = self._hints[first][i] + self._times[first]
            self._model.add_hint(known, self._hints[second][j] >= end)
            self._orders[first, i, second, j] = known
            self._orders[second, j, first, i] = ~known
        return known


def _parts(amount: float) -> int:
    """Return the whole parts, rounded down: the model never counts more than is held."""
    return floor(amount * _PARTS + _EPSILON)
