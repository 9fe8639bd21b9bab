"""Durations in whole ticks, for those who cannot count in floating point.

A tick is the largest time of which all durations are multiples, so durations written with a few
digits are not rounded at all. Others are rounded in the direction that whoever asks for them needs.
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

    Durations are seen to five digits more than the first of the shortest, and to nine more than
    that of the longest: rounding one to ticks changes it by less than 1/100000, or by less than
    1/10**9 of the longest.
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
        plan: which passes and communications there are.
        costs: durations.
        tick: length of a tick, in the unit of the costs.
        whole: how a duration becomes a whole number: ``math.floor`` or ``math.ceil``.
    """
    graph = Graph(plan, costs)
    passes: dict[PassKind, list[list[float]]] = {}
    for rank, item, time in zip(graph.ranks, graph.passes, graph.times, strict=True):
        empty = [[0.0] * plan.chunks for _ in range(plan.ranks)]
        passes.setdefault(item.kind, empty)[rank][item.chunk] = whole(_exact(time) / tick)
    comms = zip(graph.comms, graph.comm_times, strict=True)
    return Costs(passes, {comm.kind: whole(_exact(time) / tick) for comm, time in comms})


def _exact(time: float) -> Fraction:
    """Return the decimal number that was meant: 3/10 also where 0.1 + 0.2 was computed."""
    return Fraction(f"{time:.12g}")
