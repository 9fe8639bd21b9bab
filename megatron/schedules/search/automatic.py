"""Zero bubble 1p, 2p and automatic (arXiv 2401.10241, section 3): fill the memory that is allowed.

These schedules need no block. Every rank prefers backwards, then the forward on its latest stage;
passes that no other pass waits for fill the remaining time. List scheduling (``list_schedule``)
turns these urgencies and the costs into a plan. The scheduling starts from the plan that runs one
microbatch after the other, because this plan holds the least memory.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from megatron.schedules.graph import Graph
from megatron.schedules.passes import DESCENDING_KINDS, Pass, PassKind
from megatron.schedules.plan import Plan, passes_of
from megatron.schedules.search.list_schedule import Problem, Rows, Rule, list_schedule

_FLOW: Final[tuple[PassKind, ...]] = ("IF", "F", "S", "E", "T", "B", "W", "IB")
_URGENCY: Final[Mapping[PassKind, int]] = {
    "IF": 0, "S": 0, "E": 0, "T": 0, "B": 1, "F": 2, "R": 3, "IB": 4, "W": 4
}  # fmt: skip
_FILLER: Final = 4


def one_by_one(plan: Plan) -> Plan:
    """Return a plan of the same passes that runs one microbatch after the other."""

    def row(rank: int) -> tuple[Pass, ...]:
        def place(item: Pass) -> tuple[bool, int, int, int, bool]:
            stage = plan.stage_of[rank, item.chunk]
            step: PassKind = (
                "B" if item.kind == "R" else item.kind
            )  # each R goes right before its B
            unit = _place(plan, item)
            return (
                item.kind in DESCENDING_KINDS,
                unit,
                _FLOW.index(step),
                stage if step == "F" else -stage,
                step == item.kind,
            )

        first = sorted(passes_of(plan, rank), key=place)
        return tuple(
            item._replace(microbatch=i) for i in range(plan.microbatches) for item in first
        )

    return replace(plan, rows=tuple(map(row, range(plan.ranks))))


def greedy(
    plan: Plan, problem: Problem, slack: float, filler_slack: float, warm_up_slack: float
) -> Rows:
    """Return rows of the same passes, made by list scheduling with fixed urgencies.

    Args:
        plan: gives the passes; their order does not matter.
        problem: durations and limits.
        slack: a pass may delay a more urgent pass, whose start is known, by this share of its own
            duration.
        filler_slack: the slack of passes that no other pass waits for.
        warm_up_slack: the slack of all passes before a rank's first B.
    """
    graph, m, n = problem.graph, plan.microbatches, plan.slices
    keys = []
    for number, item in enumerate(graph.passes):
        first = _urgency(plan, graph, number) * plan.units + _place(plan, item)
        keys.append([first + i * n for i in range(m)])
    base = [graph.row(rank, row) for rank, row in enumerate(one_by_one(plan).rows)]
    return list_schedule(problem, base, Rule(slack, filler_slack, warm_up_slack, keys=keys))


def _place(plan: Plan, item: Pass) -> int:
    """Return the place of a pass among those of its kind, by the slices of its microbatch."""
    return plan.slices - 1 - item.slice if item.kind in DESCENDING_KINDS else item.slice


def _urgency(plan: Plan, graph: Graph, number: int) -> float:
    """Return the urgency of a pass: a whole number, the smaller the more urgent."""
    item, stages = graph.passes[number], len(plan.stages)
    urgency = _FILLER if graph.fillers[number] else _URGENCY[item.kind]
    ahead = plan.stage_of[graph.ranks[number], item.chunk] if item.kind == "F" else 0
    return float((urgency + 1) * (stages + 1) - ahead)
