"""Zero bubble 1p, 2p and automatic (arXiv 2401.10241, section 3): whatever the memory allows.

There is no block. On every rank the backward goes first, then the forward that is furthest along,
and what nobody waits for fills the rest: a rule for list scheduling, which the costs turn into a
plan. It starts from one microbatch after the other, the plan that holds the least.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from megatron.schedules.graph import Graph
from megatron.schedules.passes import Pass, PassKind
from megatron.schedules.plan import Plan, passes_of
from megatron.schedules.search.list_schedule import Problem, Rows, Rule, list_schedule

_FLOW: Final[tuple[PassKind, ...]] = ("IF", "F", "S", "E", "T", "B", "W", "IB")
_URGENCY: Final[Mapping[PassKind, int]] = {
    "IF": 0, "S": 0, "E": 0, "T": 0, "B": 1, "F": 2, "IB": 3, "W": 3
}  # fmt: skip
_FILLER: Final = 3


def one_by_one(plan: Plan) -> Plan:
    """Return the plan of the same passes that runs one microbatch after the other."""

    def row(rank: int) -> tuple[Pass, ...]:
        def place(item: Pass) -> tuple[int, int]:
            stage = plan.stage_of[rank, item.chunk]
            return _FLOW.index(item.kind), stage if item.kind == "F" else -stage

        first = sorted(passes_of(plan, rank), key=place)
        return tuple(
            item._replace(microbatch=i) for i in range(plan.microbatches) for item in first
        )

    return replace(plan, rows=tuple(map(row, range(plan.ranks))))


def greedy(
    plan: Plan, problem: Problem, slack: float, filler_slack: float, warm_up_slack: float
) -> Rows:
    """Return rows of the same passes by list scheduling with fixed urgencies.

    Args:
        plan: gives the passes; its rows do not matter.
        problem: durations and limits.
        slack: share of a pass by which it may delay a more urgent one that is sure to come.
        filler_slack: the same for passes that nobody waits for.
        warm_up_slack: the same before a rank's first B.
    """
    graph, m = problem.graph, plan.microbatches
    keys = []
    for number in range(len(graph.passes)):
        first = _urgency(plan, graph, number) * m
        keys.append([first + i for i in range(m)])
    base = [graph.row(rank, row) for rank, row in enumerate(one_by_one(plan).rows)]
    return list_schedule(problem, base, Rule(slack, filler_slack, warm_up_slack, keys=keys))


def _urgency(plan: Plan, graph: Graph, number: int) -> float:
    """Return the place of a pass in the order of urgency; whole numbers apart."""
    item, stages = graph.passes[number], len(plan.stages)
    urgency = _FILLER if graph.fillers[number] else _URGENCY[item.kind]
    ahead = plan.stage_of[graph.ranks[number], item.chunk] if item.kind == "F" else 0
    return float((urgency + 1) * (stages + 1) - ahead)
