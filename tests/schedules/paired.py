"""Plans with random pairs: any two neighbours that may be joined, whatever their costs."""

from collections import Counter
from dataclasses import replace
from random import Random

from megatron.schedules.check import check
from megatron.schedules.passes import PARTNERS, Pass
from megatron.schedules.plan import Plan

Step = tuple[Pass, ...]


def in_order(one: Pass, other: Pass) -> Step | None:
    """The two as a pair, in the order in which a row names them; ``None``: they are none."""
    for first, second in ((one, other), (other, one)):
        if second.kind in PARTNERS.get(first.kind, ()):
            return first, second
    return None


def runs(plan: Plan) -> bool:
    """Whether ``check`` accepts a plan."""
    try:
        check(plan)
    except ValueError:
        return False
    return True


def paired(plan: Plan, seed: int, share: float = 1.0) -> Plan:
    """Join random neighbours, as long as the plan still runs; ``share`` of the places are tried."""
    random, best = Random(seed), plan
    places = [(rank, at) for rank, row in enumerate(plan.rows) for at in range(len(row) - 1)]
    random.shuffle(places)
    for rank, at in places[: int(share * len(places))]:
        row = list(best.rows[rank])
        step = in_order(row[at], row[at + 1])
        taken = {number for number, item in enumerate(row) if (rank, item) in best.pairs}
        if step is None or taken & {at - 1, at, at + 1}:
            continue
        row[at : at + 2] = step
        rows = tuple(tuple(row) if r == rank else own for r, own in enumerate(best.rows))
        tried = replace(best, rows=rows, pairs=best.pairs | {(rank, step[0])})
        if runs(tried):
            best = tried
    return best


def kinds_of_pairs(plan: Plan) -> Counter[tuple[str, ...]]:
    """How often the passes of each two kinds are a pair."""
    return Counter(
        tuple(item.kind for item in step)
        for rank in range(plan.ranks)
        for step in plan.steps(rank)
        if len(step) > 1
    )
