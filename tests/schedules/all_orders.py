"""The best order of a small pipeline by trying all of them, microbatches in any order.

Which of a microbatch's passes precede which on one rank is written out here, from the papers; times
and deadlocks come from ``by_hand``.
"""

import graphlib
from collections.abc import Iterator
from contextlib import suppress
from itertools import accumulate, product

from schedules.by_hand import span

from megatron.schedules.costs import Costs
from megatron.schedules.passes import Pass
from megatron.schedules.plan import Plan

Stages = tuple[tuple[int, int], ...]
TO_THE_BACKWARD = ("IF", "F", "S", "E", "B", "IB")
TO_THE_LOSS = ("IF", "F", "S", "E", "T")


def orders(passes: frozenset[Pass], stages: Stages, rank: int) -> Iterator[tuple[Pass, ...]]:
    """Yield the rows of ``passes`` in which no microbatch contradicts itself."""
    if not passes:
        yield ()
    for item in passes:
        if not any(comes_before(other, item, stages, rank) for other in passes):
            for rest in orders(passes - {item}, stages, rank):
                yield (item, *rest)


def comes_before(one: Pass, other: Pass, stages: Stages, rank: int) -> bool:
    """Whether ``one`` precedes ``other`` of the same microbatch on the same rank."""
    if one.microbatch != other.microbatch or one == other:
        return False
    at, other_at = (
        stages.index((rank, p.chunk)) if p.kind in ("F", "B", "W") else 0 for p in (one, other)
    )
    if one.kind == other.kind:
        return one.kind != "W" and (at < other_at) == (one.kind == "F")
    if other.kind == "W":
        return one.kind == "F" or (one.kind == "B" and at >= other_at)
    flow = TO_THE_LOSS if "T" in (one.kind, other.kind) else TO_THE_BACKWARD
    if one.kind in flow and other.kind in flow:
        return flow.index(one.kind) < flow.index(other.kind)
    return False


def peak(row: tuple[Pass, ...], take: str, release: str) -> int:
    return max(accumulate((p.kind == take) - (p.kind == release) for p in row))


def best_of_all_orders(plan: Plan, costs: Costs, limit: int) -> float:
    """Return the least span of all rows within memory, microbatches in any order.

    As in the plan, one at a time is between S and T, and between IF and F.
    """
    release = "W" if plan.split_backward else "B"
    rows = [
        [
            r
            for r in every
            if peak(r, "F", release) <= limit and peak(r, "S", "T") <= 1 and peak(r, "IF", "F") <= 1
        ]
        for every in (orders(frozenset(row), plan.stages, r) for r, row in enumerate(plan.rows))
    ]
    times = []
    for chosen in product(*rows):
        tried = Plan(chosen, plan.stages, plan.microbatches, plan.treatment)
        with suppress(graphlib.CycleError):
            times.append(span(tried, costs))
    return min(times)
