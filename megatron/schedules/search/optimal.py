"""Find the shortest possible plan with CP-SAT, or prove how far a plan may be from it.

The order of the passes is a scheduling problem. Passes have fixed durations, a rank runs one pass
at a time, each pass starts after its needs, and no rank exceeds its memory. OR-Tools' CP-SAT looks
for shorter plans and for a lower bound of their time, until both are equal or the time is up.

CP-SAT counts in whole ticks, with durations rounded down. All durations, cut to some digits, are
multiples of a tick, and a tick is the largest such time (``tick_of``). So durations with few digits
are not rounded at all. If the start times of a real schedule are rounded down too, they form a
valid schedule in ticks. So a bound in ticks also holds in real time.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, floor, gcd, log10
from typing import TYPE_CHECKING, Final

from megatron.schedules.costs import Costs
from megatron.schedules.graph import Graph
from megatron.schedules.held import Held, peak_held
from megatron.schedules.passes import Pass, PassKind
from megatron.schedules.plan import Plan
from megatron.schedules.search.automatic import one_by_one
from megatron.schedules.search.order_search import OrderSearch
from megatron.schedules.timing import earliest, longest_span

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

TOLERANCE: Final = 1e-4
"""A plan counts as proven if its time exceeds the bound by at most this share. Rounding to ticks
makes a smaller difference."""


@dataclass(frozen=True)
class Optimum:
    """The best plan found, and a bound on better plans.

    Attributes:
        plan: a checked plan within the limits.
        time: its span, in the unit of the costs: the longest time between a rank's first start and
            last end, without passes that take no time (arXiv 2401.10241, section 5.3).
            Communications take their time but never wait for one another.
        bound: no plan within the limits takes less time.
        proven: whether ``time`` equals ``bound`` up to ``TOLERANCE``.
    """

    plan: Plan
    time: float
    bound: float
    proven: bool


def optimal(problem: Plan, costs: Costs, limit: float, *, seconds: float) -> Optimum:
    """Look for the shortest plan within a limit of memory, and for a proof that none is shorter.

    Args:
        problem: a checked plan with the wanted microbatches, weight gradients and treatment, with
            one chunk per rank. The search starts from the order of ``problem`` if that order keeps
            the limits. A rank may hold as many microbatches between S and T as in ``problem``. It
            may hold p more than in ``problem`` between B and IB, and, unless it has the first
            stage, also between IF and F.
        costs: durations.
        limit: the number of microbatches whose activations a rank may hold, at least 1.
        seconds: time limit. The best plan known by then is returned, at worst the initial plan.

    Raises:
        ValueError: if OR-Tools is missing, ``seconds`` is not positive, the plan is for evaluation,
            its treatment is synchronous, or with these costs the moment when a rank begins to work
            depends on the order of the plan.
    """
    assert limit >= 1, "a microbatch alone needs as much"
    _require_sound(problem, seconds)
    _require_fixed_begin(problem, costs)
    serial = one_by_one(problem)
    capacities = _capacities(problem, limit)
    plans = [plan for plan in (problem, serial) if _fits(plan, capacities)]
    model, solver = _cp_sat(seconds)
    known = min(plans, key=lambda plan: span_of(plan, costs))
    tick = tick_of(Graph(problem, costs))
    # Rounded up: with too late a begin, the span is too short, and never too long.
    working = earliest(serial, in_ticks(serial, costs, tick, ceil)).working
    begins = [int(times[0]) if times else 0 for times in working]
    search = OrderSearch(model, known, in_ticks(known, costs, tick, floor), begins)
    search.limit_memory(capacities)
    found, least = search.solve(solver)
    best = min(
        (plan for plan in (found, known) if _fits(plan, capacities)),
        key=lambda plan: span_of(plan, costs),
    )
    time = span_of(best, costs)
    bound = min(time, least * float(tick))
    return Optimum(best, time, bound, proven=time - bound <= TOLERANCE * time)


def span_of(plan: Plan, costs: Costs) -> float:
    """Return the span of a checked plan whose passes start as early as they can."""
    return longest_span(earliest(plan, costs).working)


def _cp_sat(seconds: float) -> "tuple[cp_model.CpModel, cp_model.CpSolver]":
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise ValueError(
            "an optimal schedule needs OR-Tools, which is not installed: pip install ortools (the "
            "extra 'solver'), or choose another schedule"
        ) from error
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = os.cpu_count() or 1
    solver.parameters.relative_gap_limit = TOLERANCE / 2
    return cp_model.CpModel(), solver


def _require_sound(problem: Plan, seconds: float) -> None:
    assert problem.chunks == 1, "memory is limited for one chunk per rank"
    if not seconds > 0:
        raise ValueError(f"seconds={seconds:g} leaves no time to search: give more than 0")
    if problem.forward_only or problem.treatment.synchronous:
        raise ValueError(
            "an optimal order is sought for plans that train and overlap their collectives, not "
            + ("for evaluation" if problem.forward_only else f"for {problem.treatment.name}")
        )


def _require_fixed_begin(problem: Plan, costs: Costs) -> None:
    """Raise if the order of the plan decides when a rank begins to work.

    The order does not decide in two cases. Either all ranks begin at 0 with IF; or IF takes no
    time, and each rank begins with the F of microbatch 0, which has gone through the earlier stages
    without a pause.
    """
    ranks = range(problem.ranks)
    if problem.treatment.is_sharded:
        lookups = [costs.of_pass(problem, rank, Pass("IF", 0)) for rank in ranks]
        if all(lookups):
            return
        straight = not any(lookups)
    else:
        straight = True
    if not (straight and all(costs.of_pass(problem, rank, Pass("F", 0)) for rank in ranks)):
        raise ValueError(
            "with these costs the order decides when a rank begins to work, so spans cannot be "
            "compared: give F a time on every rank, and IF on all of them or on none"
        )


def _capacities(problem: Plan, limit: float) -> list[Held]:
    """Return the most that every rank may hold."""
    capacities = []
    for rank, row in enumerate(problem.rows):
        peak = peak_held(problem, row)
        early = 0 if rank == problem.stages[0][0] else problem.ranks
        more = {"embeddings": peak.embeddings + early, "gradients": peak.gradients + problem.ranks}
        units = floor(limit * problem.slices + TOLERANCE)
        capacities.append(peak._replace(activations=units, **more))
    return capacities


def _fits(plan: Plan, capacities: Sequence[Held]) -> bool:
    return all(
        peak <= capacity + TOLERANCE
        for row, allowed in zip(plan.rows, capacities, strict=True)
        for peak, capacity in zip(peak_held(plan, row), allowed, strict=True)
    )


def tick_of(graph: Graph) -> Fraction:
    """Return the length of a tick, in the unit of the costs.

    The precision is five digits after the first digit of the shortest duration, but at most nine
    digits after the first digit of the longest. So rounding to ticks changes a duration by less
    than 1/100000 of itself, or by less than 1/10**9 of the longest.
    """
    times = [_exact(time) for time in (*graph.times, *graph.comm_times) if time > 0]
    if not times:
        return Fraction(1)
    digit = max(floor(log10(min(times))) - 5, floor(log10(max(times))) - 9)
    finest = Fraction(10) ** digit
    return finest * gcd(*(floor(time / finest) for time in times))


def in_ticks(plan: Plan, costs: Costs, tick: Fraction, whole: Callable[[Fraction], int]) -> Costs:
    """Return the costs of the plan's passes and communications in ticks.

    Args:
        plan: gives the passes and communications.
        costs: durations.
        tick: length of a tick, in the unit of the costs.
        whole: rounds a duration to a whole number: ``math.floor`` or ``math.ceil``.
    """
    graph = Graph(plan, costs)

    def of_slice(number: int) -> Costs:
        passes: dict[PassKind, list[list[float]]] = {}
        for rank, item, time in zip(graph.ranks, graph.passes, graph.times, strict=True):
            if item.slice == number:
                empty = [[0.0] * plan.chunks for _ in range(plan.ranks)]
                passes.setdefault(item.kind, empty)[rank][item.chunk] = whole(_exact(time) / tick)
        comms = zip(graph.comms, graph.comm_times, strict=True)
        own = {c.kind: whole(_exact(time) / tick) for c, time in comms if c.slice == number}
        return Costs(passes, own)

    first, *others = map(of_slice, range(plan.slices))
    return replace(first, slices=(first, *others)) if others else first


def _exact(time: float) -> Fraction:
    """Return the decimal number that was meant, such as 3/10 for the result of 0.1 + 0.2."""
    return Fraction(f"{time:.12g}")
