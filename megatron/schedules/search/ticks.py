"""Durations in whole ticks, for a solver that works with whole numbers only.

All durations are multiples of a tick, the largest such time, so durations with a few digits are not
rounded at all. For other durations the caller chooses the direction of rounding.
"""

from collections.abc import Callable
from fractions import Fraction
from math import floor, gcd, log10

from megatron.schedules.costs import Costs
from megatron.schedules.graph import Graph
from megatron.schedules.passes import PassKind
from megatron.schedules.plan import Plan


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
