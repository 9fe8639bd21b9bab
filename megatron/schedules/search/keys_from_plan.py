"""Let a plan with vocabulary passes follow the same plan without vocabulary passes.

A good schedule is hard to find. Once found, it has room for the passes of the output layer nearly
anywhere. So the starts in the plan without vocabulary passes become the keys of list scheduling,
which places passes with small keys first. The key of each vocabulary pass lies next to the key of a
pass that it depends on or precedes.
"""

from collections.abc import Mapping

from megatron.schedules.costs import Costs
from megatron.schedules.graph import Graph
from megatron.schedules.passes import Pass, PassKind
from megatron.schedules.plan import Plan
from megatron.schedules.timing import earliest


def keys_from_plan(
    plan: Plan, graph: Graph, without: Plan, costs: Costs, held_back: float
) -> list[list[float]]:
    """Return the key of every pass of ``plan``, by its number and microbatch.

    The keys of F, B and W are their starts in ``without``, stretched because a microbatch now takes
    longer. S goes right after the last stage's F, and T half an interval later. IF goes one
    interval before the first stage's F, and IB one interval after the first stage's B.

    Args:
        plan: the plan with vocabulary passes.
        graph: its numbered passes.
        without: the plan without vocabulary passes, for the same number of microbatches.
        costs: durations for both plans.
        held_back: intervals by which each barrier delays B and W.
    """
    timing = earliest(without, costs)
    interval = sum(graph.times) / (plan.ranks * plan.slices)
    stretch = sum(graph.times) / (sum(Graph(without, costs).times) or 1.0)
    starts = {
        (rank, item): start * stretch
        for rank, (row, times) in enumerate(zip(without.rows, timing.starts, strict=True))
        for item, start in zip(row, times, strict=True)
    }
    keys = []
    for rank, item in zip(graph.ranks, graph.passes, strict=True):
        row = []
        for i in range(plan.microbatches):
            (place, anchor), intervals = _anchor(plan, rank, item, held_back)
            row.append(starts[place, anchor._replace(microbatch=i)] + intervals * interval)
        # Passes of a kind run in the order of microbatches, so their keys ascend too.
        keys.append(sorted(row))
    return keys


def _anchor(plan: Plan, rank: int, item: Pass, held_back: float) -> tuple[tuple[int, Pass], float]:
    """Return the pass next to which ``item`` goes, and the intervals from it to ``item``."""
    (first, first_chunk), (last, last_chunk) = plan.stages[0], plan.stages[-1]
    after_last = (last, Pass("F", 0, last_chunk, item.slice))
    inserted: Mapping[PassKind, tuple[tuple[int, Pass], float]] = {
        "S": (after_last, 0.01),
        "E": (after_last, 0.25),
        "T": (after_last, 0.5),
        "IF": ((first, Pass("F", 0, first_chunk, item.slice)), -1.0),
        "IB": ((first, Pass("B", 0, first_chunk, item.slice)), 1.0),
    }
    if item.kind in inserted:
        return inserted[item.kind]
    held = 0.0 if item.kind == "F" else held_back * plan.treatment.delay
    return (rank, item), held
