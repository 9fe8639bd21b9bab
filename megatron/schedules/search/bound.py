"""A lower bound on the time of a schedule, computed from one microbatch without making the plan."""

from collections.abc import Callable, Collection

from megatron.schedules.costs import Costs
from megatron.schedules.passes import Pass, PassKind
from megatron.schedules.plan import Plan, passes_of


def least_time(one: Plan, costs: Costs, microbatches: int) -> float:
    """Return ``least_time_by`` with durations from ``costs``; communications count as free."""
    return least_time_by(one, lambda rank, item: costs.of_pass(one, rank, item), microbatches)


def least_time_by(
    one: Plan,
    time_of: Callable[[int, Pass], float],
    microbatches: int,
    awaited: Collection[PassKind] = (),
) -> float:
    """Return a time that no order of the passes can beat.

    Every rank runs all its passes. All its passes except IF wait until the first slice has gone
    forward through the stages before the rank's first stage. When the rank's last B has ended, one
    slice still has to go back through these earlier stages. Of these stages only B counts, because
    R may have run before.

    Args:
        one: a plan of the schedule for one microbatch.
        time_of: duration of a pass on a rank.
        microbatches: m.
        awaited: further kinds of passes. Every B waits for the passes of these kinds, of its own
            microbatch, on all ranks. So a rank has run all passes of these kinds when its last B
            has ended.

    Returns:
        Time, in the unit of the durations.
    """
    least = head = tail = 0.0
    seen: set[int] = set()
    for rank, chunk in one.stages:
        if rank not in seen:
            seen.add(rank)
            times = {item: time_of(rank, item) for item in passes_of(one, rank)}
            work = microbatches * sum(times.values())
            layers = microbatches * sum(
                t for item, t in times.items() if item.kind in ("F", "R", "B", *awaited)
            )
            embedding = microbatches * sum(t for item, t in times.items() if item.kind == "IF")
            least = max(least, work, head + work - embedding, head + layers + tail)
        head += time_of(rank, Pass("F", 0, chunk))
        tail += time_of(rank, Pass("B", 0, chunk))
    return least
