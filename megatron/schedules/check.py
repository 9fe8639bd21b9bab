"""Prove that a plan can be run: each pass occurs once, no deadlock, the memory promise is kept."""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Final

from megatron.schedules.costs import Costs
from megatron.schedules.counted import counted
from megatron.schedules.graph import Graph
from megatron.schedules.held import in_flight
from megatron.schedules.needs import Comm, needs
from megatron.schedules.passes import PARTNERS, PASS_KINDS, Pass
from megatron.schedules.plan import Plan, passes_of
from megatron.schedules.timing import earliest, walk

_NO_TIME: Final = Costs(dict.fromkeys(PASS_KINDS, 0.0))
"""Whether a plan deadlocks does not depend on durations."""


def check(plan: Plan, in_flight_limit: Sequence[float] | None = None) -> None:
    """Check ``plan``.

    Args:
        plan: the plan.
        in_flight_limit: for every rank, the promised peak of microbatches in flight, if any.

    Raises:
        ValueError: if the plan cannot be run or exceeds the limit. The message names the rank and
            the pass, and shows the plan around the pass as a grid.
    """
    _check_header(plan)
    for rank in range(plan.ranks):
        _check_row(plan, rank)
    _check_pairs(plan)
    _check_deadlock(plan)
    if in_flight_limit is not None:
        for rank, (peak, limit) in enumerate(zip(in_flight(plan), in_flight_limit, strict=True)):
            if peak > limit + 1e-9:
                raise ValueError(
                    f"rank {rank} holds up to {counted(peak, 'microbatch')}, "
                    f"the schedule promises {limit:g}"
                )


def _check_header(plan: Plan) -> None:
    for name, number in (("microbatch", plan.microbatches), ("slice", plan.slices)):
        if number < 1:
            raise ValueError(f"a plan needs at least 1 {name}, this one has {number}")
    least = min(map(len, plan.rows), default=0)
    if plan.slices > max(least, 1):  # before the passes of a microbatch are listed
        raise ValueError(
            f"a rank has {counted(least, 'pass')}, too few for {plan.slices} slices of a microbatch"
        )
    # Compare the numbers first: with a stage such as 0.1000000000 the set would be huge.
    right = len(plan.stages) == plan.ranks * plan.chunks and set(plan.stages) == {
        (rank, chunk) for chunk in range(plan.chunks) for rank in range(plan.ranks)
    }
    if not right:
        stages = " ".join(f"{rank}.{chunk}" for rank, chunk in plan.stages[:8])
        raise ValueError(
            f"the stages {stages}{' ...' if len(plan.stages) > 8 else ''} do not name every (rank, "
            f"chunk) of {counted(plan.ranks, 'rank')} and {counted(plan.chunks, 'chunk')} exactly "
            "once"
        )
    if plan.ahead_stage is not None and plan.ahead_stage >= len(plan.stages):
        raise ValueError(
            f"'looks ahead {plan.ahead_stage}' names none of the stages 0 to "
            f"{len(plan.stages) - 1}: lower it"
        )
    if plan.offloaded > plan.chunks:
        raise ValueError(
            f"'offloaded {plan.offloaded}' is more than the "
            f"{counted(plan.chunks, 'chunk')} of a rank: lower it"
        )


def _check_row(plan: Plan, rank: int) -> None:
    first = passes_of(plan, rank)
    places = {(kind, chunk, s) for kind, _, chunk, s in first}
    seen: set[Pass] = set()
    for index, item in enumerate(plan.rows[rank]):
        place = (item.kind, item.chunk, item.slice)
        if place not in places or item.microbatch >= plan.microbatches:
            raise ValueError(f"rank {rank} cannot run {item}\n{grid(plan, {rank: index})}")
        if item in seen:
            raise ValueError(f"rank {rank} runs {item} twice\n{grid(plan, {rank: index})}")
        seen.add(item)
    if len(seen) == len(first) * plan.microbatches:
        return
    # Only as many as the message names: a plan may promise more microbatches than can be listed.
    in_order = sorted(first)
    expected = (item._replace(microbatch=i) for i in range(plan.microbatches) for item in in_order)
    missing = list(islice((item for item in expected if item not in seen), 9))
    if missing:
        names = " ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")
        raise ValueError(f"rank {rank} never runs {names}\n{grid(plan, {rank: len(seen)})}")


def _check_pairs(plan: Plan) -> None:
    """Check that the passes of each pair stand side by side, and that neither needs the other."""
    found = 0
    for rank, row in enumerate(plan.rows) if plan.pairs else ():
        for index, item in enumerate(row):
            if (rank, item) not in plan.pairs:
                continue
            found += 1
            other = row[index + 1] if index + 1 < len(row) else None
            fault = _fault_of_pair(plan, item, other)
            if fault is not None:
                raise ValueError(f"rank {rank} cannot join {fault}\n{grid(plan, {rank: index})}")
    if found < len(plan.pairs):
        run = {(rank, item) for rank, row in enumerate(plan.rows) for item in row}
        rank, item = min(plan.pairs - run)
        raise ValueError(f"rank {rank} joins {item}, which it never runs")


def _fault_of_pair(plan: Plan, item: Pass, other: Pass | None) -> str | None:
    """Return the reason why two neighbours cannot be a pair; ``None``: they may be."""
    partners = PARTNERS.get(item.kind, ())
    if other is None or other.kind not in partners:
        ways = f"after {item.kind} stands {' or '.join(partners)}" if partners else "F or B begins"
        return f"{item} with {other or 'the end of its row'}: in a pair, {ways}"
    if plan.treatment.synchronous and other.kind in ("S", "T"):
        return f"{item} and {other}: all ranks meet at S and T of {plan.treatment.name}"
    if item.microbatch != other.microbatch:
        return None
    if item.kind == "F":
        return f"{item} and {other}: {other.kind} waits for every F of its own microbatch"
    same = item._replace(kind=other.kind) == other
    return f"{item} and {other}: a W waits for its B" if other.kind == "W" and same else None


def _check_deadlock(plan: Plan) -> None:
    graph = Graph(plan, _NO_TIME)
    if not walk(graph, graph.rows(plan), graph.pairs(plan)).stuck:
        return
    timing = earliest(plan, _NO_TIME)
    reasons = []
    for rank, index in sorted(timing.stuck.items()):
        row, done = plan.rows[rank], set(plan.rows[rank][:index])
        step = row[index : index + 1 + ((rank, row[index]) in plan.pairs)]
        missing = [
            str(need)
            for item in step
            for need in needs(plan, rank, item)
            if (need not in timing.ready if isinstance(need, Comm) else need not in done)
        ]
        name = "|".join(map(str, step))
        reasons.append(f"rank {rank} waits at {name} for {', '.join(missing)}")
    raise ValueError("the plan deadlocks: " + "; ".join(reasons) + "\n" + grid(plan, timing.stuck))


def grid(plan: Plan, marked: Mapping[int, int] | None = None, around: int = 6) -> str:
    """Return the plan as text: one row per rank, with at most one pass of each ``>marked<``.

    Args:
        plan: the plan.
        marked: for some ranks, the index of the pass to mark.
        around: number of passes shown on either side of the mark; rows without a mark are cut at
            the leftmost mark of the other rows.
    """
    marked = marked or {}
    lines = []
    centre = min(marked.values(), default=0)
    for rank, row in enumerate(plan.rows):
        at = marked.get(rank)
        middle = centre if at is None else at
        first, last = max(0, middle - around), middle + around + 1
        cells = [f">{item}<" if i == at else str(item) for i, item in enumerate(row)][first:last]
        if at == len(row):
            cells.append("> <")
        head, tail = ("... " if first else ""), (" ..." if last < len(row) else "")
        lines.append(f"  rank {rank}: {head}{' '.join(cells)}{tail}")
    return "\n".join(lines)
