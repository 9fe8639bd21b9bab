"""Find the shortest possible plan with CP-SAT, or prove how far a plan may be from it.

The order of the passes is a scheduling problem. Passes have fixed durations, a rank runs one at a
time, each starts after its needs, and no rank exceeds its memory. OR-Tools' CP-SAT looks for
shorter plans and for a lower bound of their time, until both are equal or the time is up.

CP-SAT counts in whole ticks, with durations rounded down. All durations are multiples of a tick,
the largest such time, so durations with a few digits are not rounded at all. If the start times of
a real schedule are rounded down too, they form a valid schedule in ticks. So a bound in ticks also
holds in real time.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, floor, gcd, inf, log10
from typing import TYPE_CHECKING, Final, Literal

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

Objective = Literal["span", "makespan"]
"""``span`` is the longest time between a rank's first start and last end, without passes that take
no time (arXiv 2401.10241, section 5.3). ``makespan`` is the last end of all passes."""

TOLERANCE: Final = 1e-4
"""A plan counts as proven if its time exceeds the bound by at most this share. Rounding to ticks
makes a smaller difference."""


@dataclass(frozen=True)
class Optimum:
    """The best plan found, and what is known about better ones.

    Attributes:
        plan: a checked plan within the limits.
        time: its span or makespan, in the unit of the costs. Communications take their time but
            never wait for one another.
        bound: no plan within the limits takes less time.
        proven: whether ``time`` equals ``bound`` up to ``TOLERANCE``.
    """

    plan: Plan
    time: float
    bound: float
    proven: bool


def optimal(
    problem: Plan,
    costs: Costs,
    limits: Sequence[float],
    *,
    seconds: float,
    objective: Objective = "span",
    hint: Plan | None = None,
    ahead: int | None = 0,
    kept: float = 1.0,
    workers: int | None = None,
) -> Optimum:
    """Look for the shortest plan within limits of memory, and for a proof that none is shorter.

    Args:
        problem: a checked plan with the wanted stages, microbatches, weight gradients and
            treatment. The search starts from its order if it keeps the limits.
        costs: durations.
        limits: for every rank, how many activations of a chunk it may hold.
        seconds: time limit. Returned is the best plan known by then, at worst the initial one.
        objective: the time to minimise.
        hint: another checked plan of the same passes; the search starts from it if it is better.
        ahead: how many microbatches more than in ``problem`` a rank may hold between S and T,
            between IF and F, and between B and IB. Any rank may hold p more between B and IB, and
            ranks without the first stage between IF and F. ``None`` for any number.
        kept: share of activations that stays from B to W, as in ``held_changes``.
        workers: threads of the solver; one per core if ``None``.

    Raises:
        ValueError: if OR-Tools is missing, a limit is below the need of one microbatch, ``hint``
            has other passes than ``problem``, ``seconds`` is not positive, or the plan is one for
            evaluation or with a synchronous treatment.
    """
    _require_sound(problem, hint, seconds)
    if objective == "span":
        _require_fixed_begin(problem, costs)
    serial = one_by_one(problem)
    capacities = _capacities(problem, serial, limits, ahead, kept)
    plans = [plan for plan in (hint, problem, serial) if plan and _fits(plan, capacities, kept)]
    model, solver = _cp_sat(seconds, workers or os.cpu_count() or 1)
    known = min(plans, key=lambda plan: duration(plan, costs, objective))
    tick = tick_of(Graph(problem, costs))
    # Rounded up: if the span counts from too late a begin, it is too short, never too long.
    working = earliest(serial, in_ticks(serial, costs, tick, ceil)).working
    begins = [int(times[0]) if times and objective == "span" else 0 for times in working]
    search = OrderSearch(model, known, in_ticks(known, costs, tick, floor), begins)
    search.limit_memory(capacities, kept)
    found, least = search.solve(solver)
    best = min(
        (plan for plan in (found, known) if _fits(plan, capacities, kept)),
        key=lambda plan: duration(plan, costs, objective),
    )
    time = duration(best, costs, objective)
    bound = min(time, least * float(tick))
    return Optimum(best, time, bound, proven=time - bound <= TOLERANCE * time)


def duration(plan: Plan, costs: Costs, objective: Objective) -> float:
    """Return the span or makespan of a checked plan whose passes start as early as they can."""
    working = earliest(plan, costs).working
    if objective == "span":
        return longest_span(working)
    return max((times[1] for times in working if times), default=0.0)


def _cp_sat(seconds: float, workers: int) -> "tuple[cp_model.CpModel, cp_model.CpSolver]":
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise ValueError(
            "an optimal schedule needs OR-Tools, which is not installed: pip install ortools (the "
            "extra 'solver'), or choose another schedule"
        ) from error
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = workers
    solver.parameters.relative_gap_limit = TOLERANCE / 2
    return cp_model.CpModel(), solver


def _require_sound(problem: Plan, hint: Plan | None, seconds: float) -> None:
    if not seconds > 0:
        raise ValueError(f"seconds={seconds:g} leaves no time to search: give more than 0")
    if problem.forward_only or problem.treatment.synchronous:
        raise ValueError(
            "an optimal order is sought for plans that train and overlap their collectives, not "
            + ("for evaluation" if problem.forward_only else f"for {problem.treatment.name}")
        )
    if hint is not None and replace(hint, rows=problem.rows) != problem:
        raise ValueError("the hint is a plan of other stages, microbatches or treatment")
    if hint is not None and hint.split_backward != problem.split_backward:
        raise ValueError("only one of hint and problem splits the backward: give two alike")


def _require_fixed_begin(problem: Plan, costs: Costs) -> None:
    """Raise if the order of the plan decides when a rank begins to work.

    It does not decide in two cases: all ranks begin at 0 with IF, or IF takes no time and each rank
    begins with the F of microbatch 0, which has gone through the stages before without a pause.
    """
    ranks = range(problem.ranks)
    if problem.treatment.is_sharded:
        lookups = [costs.of_pass(problem, rank, Pass("IF", 0)) for rank in ranks]
        if all(lookups):
            return
        straight = not any(lookups)
    else:
        straight = True
    firsts = problem.stages[: problem.ranks]
    working = [costs.of_pass(problem, rank, Pass("F", 0, chunk)) > 0 for rank, chunk in firsts]
    if not (straight and all(working) and len({rank for rank, _ in firsts}) == problem.ranks):
        raise ValueError(
            "with these stages and costs the order decides when a rank begins to work, so spans "
            "cannot be compared: choose the objective makespan"
        )


def _capacities(
    problem: Plan, serial: Plan, limits: Sequence[float], ahead: int | None, kept: float
) -> list[Held]:
    """Return the most that every rank may hold."""
    if len(limits) != problem.ranks:
        raise ValueError(f"{len(limits)} limits for {problem.ranks} ranks: give one for each rank")
    capacities = []
    for rank, limit in enumerate(limits):
        least = peak_held(serial, serial.rows[rank], kept).activations
        if not limit >= least:
            raise ValueError(
                f"rank {rank} may hold {limit:g} activations of a chunk, but a microbatch alone "
                f"needs {least:g}: raise its limit to that or more"
            )
        peak = peak_held(problem, problem.rows[rank], kept)
        more = inf if ahead is None else ahead
        early = 0 if rank == problem.stages[0][0] else problem.ranks
        embeddings = peak.embeddings + more + early
        exponentials, gradients = peak.exponentials + more, peak.gradients + more + problem.ranks
        capacities.append(Held(limit, exponentials, embeddings, peak.recomputed, gradients))
    return capacities


def _fits(plan: Plan, capacities: Sequence[Held], kept: float) -> bool:
    return all(
        peak <= capacity + TOLERANCE
        for row, allowed in zip(plan.rows, capacities, strict=True)
        for peak, capacity in zip(peak_held(plan, row, kept), allowed, strict=True)
    )


def tick_of(graph: Graph) -> Fraction:
    """Return the length of a tick, in the unit of the costs.

    The precision is five digits after the first digit of the shortest duration, but at most nine
    after that of the longest. So rounding to ticks changes a duration by less than 1/100000 of
    itself, or by less than 1/10**9 of the longest.
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
    passes: dict[PassKind, list[list[float]]] = {}
    for rank, item, time in zip(graph.ranks, graph.passes, graph.times, strict=True):
        empty = [[0.0] * plan.chunks for _ in range(plan.ranks)]
        passes.setdefault(item.kind, empty)[rank][item.chunk] = whole(_exact(time) / tick)
    comms = zip(graph.comms, graph.comm_times, strict=True)
    return Costs(passes, {comm.kind: whole(_exact(time) / tick) for comm, time in comms})


def _exact(time: float) -> Fraction:
    """Return the decimal number that was meant, such as 3/10 for the result of 0.1 + 0.2."""
    return Fraction(f"{time:.12g}")
