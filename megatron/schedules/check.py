"""Prove that a plan can be run: every pass exactly once, no deadlock, memory promise kept."""

from collections.abc import Mapping, Sequence

from megatron.schedules.needs import Comm, needs
from megatron.schedules.passes import Pass, PassKind
from megatron.schedules.plan import VOCABULARY_BARRIERS, Plan
from megatron.schedules.timing import earliest


def check(plan: Plan, in_flight_limit: Sequence[float] | None = None) -> None:
    """Check ``plan``.

    Args:
        plan: the plan.
        in_flight_limit: promised peak of microbatches in flight for every rank, if any.

    Raises:
        ValueError: naming rank and pass, with the grid around the offending cell.
    """
    _check_header(plan)
    for rank in range(plan.ranks):
        _check_row(plan, rank)
    _check_deadlock(plan)
    if in_flight_limit is not None:
        for rank, (peak, limit) in enumerate(zip(in_flight(plan), in_flight_limit, strict=True)):
            if peak > limit + 1e-9:
                raise ValueError(
                    f"rank {rank} holds up to {peak:g} microbatches, "
                    f"the schedule promises {limit:g}"
                )


def in_flight(plan: Plan) -> list[float]:
    """Return every rank's peak of microbatches whose activations it holds.

    A microbatch is held from its F to its B (to its W where weight gradients are split off). A
    chunk counts as its share 1/v of the rank's layers.
    """
    return [peaks_held(plan, rank)[0] / plan.chunks for rank in range(plan.ranks)]


def held_changes(plan: Plan, item: Pass) -> tuple[int, int, int]:
    """Return by how much ``item`` changes what its rank holds.

    Counted are the activations of a chunk between F and B (or W), the exponentials of the output
    layer between S and T, and the embeddings between IF and the F of chunk 0.
    """
    release = "W" if plan.split_backward else "B"
    return (
        (item.kind == "F") - (item.kind == release),
        (item.kind == "S") - (item.kind == "T"),
        (item.kind == "IF") - (item.kind == "F" and item.chunk == 0 and plan.barriers is not None),
    )


def peaks_held(plan: Plan, rank: int) -> tuple[int, int, int]:
    """Return the peaks of what ``held_changes`` counts on ``rank``."""
    held, peaks = [0, 0, 0], [0, 0, 0]
    for item in plan.rows[rank]:
        for i, change in enumerate(held_changes(plan, item)):
            held[i] += change
            peaks[i] = max(peaks[i], held[i])
    return peaks[0], peaks[1], peaks[2]


def expected_passes(plan: Plan, rank: int) -> set[Pass]:
    """Return the passes that ``rank`` must run, each exactly once."""
    kinds: list[PassKind] = ["F"] if plan.forward_only else ["F", "B"]
    if plan.split_backward:
        kinds.append("W")
    chunks = [chunk for owner, chunk in plan.stages if owner == rank]
    places: list[tuple[PassKind, int]] = [(kind, chunk) for kind in kinds for chunk in chunks]
    if plan.barriers is not None:
        places += [("S", 0), ("T", 0), ("IF", 0)]
        if not plan.forward_only:
            places.append(("IB", 0))
    return {Pass(kind, i, chunk) for kind, chunk in places for i in range(plan.microbatches)}


def _check_header(plan: Plan) -> None:
    if plan.microbatches < 1:
        raise ValueError(f"a plan needs at least 1 microbatch, this one has {plan.microbatches}")
    if plan.barriers not in VOCABULARY_BARRIERS.values():
        raise ValueError(
            f"{plan.barriers} barriers are none that the output layer has: write 1, 2, or none "
            "where the vocabulary is not split"
        )
    places = [(rank, chunk) for chunk in range(plan.chunks) for rank in range(plan.ranks)]
    if sorted(plan.stages) != sorted(places):
        raise ValueError(
            f"the stages {plan.stages} do not name every (rank, chunk) of {plan.ranks} ranks and "
            f"{plan.chunks} chunks exactly once"
        )


def _check_row(plan: Plan, rank: int) -> None:
    expected = expected_passes(plan, rank)
    seen: set[Pass] = set()
    for index, item in enumerate(plan.rows[rank]):
        if item not in expected:
            raise ValueError(f"rank {rank} cannot run {item}\n{grid(plan, {rank: index})}")
        if item in seen:
            raise ValueError(f"rank {rank} runs {item} twice\n{grid(plan, {rank: index})}")
        seen.add(item)
    missing = sorted(expected - seen, key=lambda item: (item.microbatch, item.kind))
    if missing:
        names = " ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")
        raise ValueError(f"rank {rank} never runs {names}\n{grid(plan, {rank: len(seen)})}")


def _check_deadlock(plan: Plan) -> None:
    timing = earliest(plan)
    if not timing.stuck:
        return
    reasons = []
    for rank, index in sorted(timing.stuck.items()):
        item, done = plan.rows[rank][index], set(plan.rows[rank][:index])
        missing = [
            str(need)
            for need in needs(plan, rank, item)
            if (need not in timing.ready if isinstance(need, Comm) else need not in done)
        ]
        reasons.append(f"rank {rank} waits at {item} for {', '.join(missing)}")
    raise ValueError("the plan deadlocks: " + "; ".join(reasons) + "\n" + grid(plan, timing.stuck))


def grid(plan: Plan, marked: Mapping[int, int] | None = None, around: int = 6) -> str:
    """Return the plan as text, one row per rank, with one cell per rank ``>marked<``.

    Args:
        plan: the plan.
        marked: for some ranks, the index of the pass to mark.
        around: passes shown on either side of a marked one; rows without a mark are cut alike.
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
