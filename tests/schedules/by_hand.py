"""The dependencies of a pipeline and its times, written out a second time, from the papers.

Nothing here asks ``needs``, ``sources`` or ``earliest``: a plan is read as rows of labels, its
edges are listed one sentence at a time, and times are longest paths. ``graphlib`` orders the passes
and finds the cycles.
"""

import graphlib
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise

from megatron.schedules.passes import Pass
from megatron.schedules.plan import Plan

Node = tuple[int, str]
"""(rank, label of a pass); rank -1 for a barrier, which takes no time."""


def label(kind: str, microbatch: int, chunk: int) -> str:
    return f"{kind}{microbatch}" if chunk == 0 else f"{kind}{microbatch}.{chunk}"


def predecessors(plan: Plan) -> dict[Node, set[Node]]:
    """Return what every pass must come after, the pass before it in its row included."""
    before: dict[Node, set[Node]] = defaultdict(set)
    for rank, row in enumerate(plan.rows):
        labels = [(rank, str(item)) for item in row]
        before.update({node: set() for node in labels})
        for earlier, later in pairwise(labels):
            before[later].add(earlier)
    for microbatch in range(plan.microbatches):
        _flow(plan, microbatch, before)
        if plan.barriers is not None:
            _vocabulary(plan, microbatch, before)
    return before


def _flow(plan: Plan, i: int, before: dict[Node, set[Node]]) -> None:
    """The forward goes up the stages, the backward comes down, both within the microbatch."""
    forwards = [(rank, label("F", i, chunk)) for rank, chunk in plan.stages]
    for source, target in pairwise(forwards):
        before[target].add(source)
    if plan.forward_only:
        return
    backwards = [(rank, label("B", i, chunk)) for rank, chunk in plan.stages]
    for forward, backward in zip(forwards, backwards, strict=True):
        before[backward].add(forward)
    for target, source in pairwise(backwards):
        before[target].add(source)
    if any(p.kind == "W" for row in plan.rows for p in row):
        for (rank, chunk), backward in zip(plan.stages, backwards, strict=True):
            before[rank, label("W", i, chunk)].add(backward)


def _vocabulary(plan: Plan, i: int, before: dict[Node, set[Node]]) -> None:
    """S and T on every rank around the barriers, IF ahead of the first F, IB behind its B."""
    ranks = range(plan.ranks)
    (first, first_chunk), (last, last_chunk) = plan.stages[0], plan.stages[-1]
    every = {kind: {(rank, f"{kind}{i}") for rank in ranks} for kind in ("S", "T", "IF", "IB")}
    for kind in ("S", "T", "IF"):
        before[-1, f"all {kind}{i}"] = every[kind]
    before[first, label("F", i, first_chunk)].add((-1, f"all IF{i}"))
    for rank in ranks:
        before[rank, f"S{i}"].add((last, label("F", i, last_chunk)))
        before[rank, f"T{i}"].add((-1, f"all S{i}"))
    if plan.forward_only:
        return
    barrier = {1: "S", 2: "T"}[plan.barriers or 0]
    before[last, label("B", i, last_chunk)].add((-1, f"all {barrier}{i}"))
    for node in every["IB"]:
        before[node] |= {(first, label("B", i, first_chunk)), (node[0], f"IF{i}")}


def end_times(plan: Plan, cost: Callable[[int, Pass], float]) -> list[list[float]]:
    """Return when every pass of every row ends, communication being free: longest paths.

    Raises:
        graphlib.CycleError: if the plan deadlocks.
    """
    before = predecessors(plan)
    costs = {(rank, str(p)): cost(rank, p) for rank, row in enumerate(plan.rows) for p in row}
    ends: dict[Node, float] = {}
    for node in graphlib.TopologicalSorter(before).static_order():
        start = max((ends[earlier] for earlier in before[node]), default=0.0)
        ends[node] = start + (0.0 if node[0] < 0 else costs[node])
    return [[ends[rank, str(p)] for p in row] for rank, row in enumerate(plan.rows)]


def one_f_one_b_row(ranks: int, rank: int, microbatches: int) -> list[str]:
    """Return a row of 1F1B as Megatron's loop runs it: warm-up, steady state, cool-down."""
    warm_up = min(ranks - rank - 1, microbatches)
    row = [f"F{i}" for i in range(warm_up)]
    for i in range(microbatches - warm_up):
        row += [f"F{warm_up + i}", f"B{i}"]
    return row + [f"B{i}" for i in range(microbatches - warm_up, microbatches)]
