"""The order of the passes as a scheduling problem for OR-Tools' CP-SAT; ``optimal`` solves it.

Start times are whole ticks. Passes of one kind and chunk run in the order of their microbatches.
This excludes no better schedule: in any schedule, the k-th pass of a kind and chunk to start can be
given to microbatch k. Then ranks are as busy and hold as much as before, and all needs are still
met in time. For example, if every B starts after the F of its own microbatch ends, then the k-th B
to start does so after the k-th F to end. Slices of a microbatch run in their order too, and one
microbatch after the other. If they take equal times, this excludes no better schedule either, for
the same reason.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron.schedules.check import check
from megatron.schedules.costs import Costs
from megatron.schedules.graph import Graph
from megatron.schedules.held import Held, held_changes
from megatron.schedules.passes import DESCENDING_KINDS
from megatron.schedules.plan import Plan
from megatron.schedules.timing import Timing, earliest

if TYPE_CHECKING:
    from ortools.sat.python import cp_model


class OrderSearch:
    """The CP-SAT model: it has a start time for every pass, and its solution becomes a plan.

    Ranks have one chunk each. Memory is unlimited until ``limit_memory`` is called.
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
        # No plan takes less time than the work of the busiest rank.
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
        for variables, values in zip(self._starts, self._known_starts(timing), strict=True):
            for variable, value in zip(variables, values, strict=True):
                model.add_hint(variable, value)
        for number in range(len(self._times)):
            self._order(number)
        total = model.new_int_var(self._work, max(self._work, longest), "")
        for rank, begin in enumerate(begins):
            self._one_at_a_time(rank, total + begin)
        model.minimize(total)

    def limit_memory(self, capacities: Sequence[Held]) -> None:
        """Limit every rank to its capacity.

        One pass of a unit takes a quantity, and another pass releases it. So the k-th taking pass
        waits for the releasing pass that is number k - capacity.
        """
        for rank, allowed in enumerate(capacities):
            changes = {n: held_changes(self._known, self._graph.passes[n]) for n in self._own(rank)}
            for i, capacity in enumerate(allowed):
                takes = self._units([n for n, change in changes.items() if change[i] > 0])
                releases = self._units([n for n, change in changes.items() if change[i] < 0])
                for (take, unit), (release, other) in zip(
                    takes[int(capacity) :], releases, strict=False
                ):
                    released = self._end(release, other)
                    self._model.add(self._starts[take][unit] >= released)

    def _units(self, numbers: Sequence[int]) -> list[tuple[int, int]]:
        """Return the numbers and microbatches of passes of one kind in the order of their units."""
        passes = self._graph.passes

        def place(number: int) -> int:
            item = passes[number]
            return -item.slice if item.kind in DESCENDING_KINDS else item.slice

        inner = sorted(numbers, key=place)
        return [(number, i) for i in range(self._graph.microbatches) for number in inner]

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

        Passes that take no time may start at the same moment as others. Passes that start together
        are sorted by microbatch, and within a microbatch as in the known plan.
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
        """Return the starts of every pass in the known plan, in the order of microbatches."""
        m = self._graph.microbatches
        known: list[list[int]] = [[] for _ in self._starts]
        for rank, row in enumerate(self._known.rows):
            for item, start in zip(self._graph.row(rank, row), timing.starts[rank], strict=True):
                known[item // m].append(int(start))
        return [sorted(starts) for starts in known]

    def _order(self, number: int) -> None:
        """Put a pass after its needs, and after the same pass of the previous unit."""
        graph = self._graph
        lags = [(own, 0) for own in graph.own_needs[number]]
        for comm in graph.comm_needs[number]:
            feeders = [n for n, fed in enumerate(graph.feeds) if comm in fed]
            lags += [(feeder, int(graph.comm_times[comm])) for feeder in feeders]
        before, earlier = graph.previous[number] if graph.previous else (number, 1)
        for i, start in enumerate(self._starts[number]):
            if i >= earlier:
                self._model.add(start >= self._end(before, i - earlier))
            for needed, lag in lags:
                self._model.add(start >= self._end(needed, i) + lag)

    def _one_at_a_time(self, rank: int, finish: "cp_model.LinearExprT") -> None:
        """Forbid overlap of a rank's passes, and let all that take time end before ``finish``."""
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
