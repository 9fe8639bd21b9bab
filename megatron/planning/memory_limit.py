"""A limit by memory: how many microbatches each rank may have in flight within it.

The bytes of a rank are counted, as in a dry run, for plans that run all forwards first. Their last
forward leaves a rank with as many microbatches in flight as the plan has. So two such plans tell
what one more microbatch takes, and the rest of the limit tells how many more there may be. A
searched plan may hold somewhat more for the vocabulary, whose passes wait for idle time. So the
bytes of the plan itself are compared with the limit in the end (``Candidate.run_plan``).
"""

from collections.abc import Sequence
from math import floor, inf
from typing import Final

from megatron.planning.count.run import count_ranks
from megatron.planning.limit_of_rank import Use, memory_limit_of
from megatron.planning.planned_run import RunPlan
from megatron.planning.run_buckets import RankBuckets, run_buckets
from megatron.planning.run_memory import run_memory
from megatron.run.run_config import RunConfig
from megatron.schedules.catalogue import SCHEDULES, TRAITS
from megatron.schedules.counted import counted
from megatron.schedules.forwards_first import forwards_first
from megatron.schedules.from_block import promised
from megatron.schedules.make_plan import as_compared, one_microbatch_of
from megatron.schedules.plan import plan_of_one
from megatron.schedules.request import Request
from megatron.simulator.costs.rank_memory import peaks
from megatron.simulator.units import MEMORY

_NEARLY: Final = 1e-9
"""A number of chunks that is so little below a whole one is that whole one."""


def uses(config: RunConfig, run_plan: RunPlan) -> list[Use]:
    """Return the bytes of every rank under a plan, by the run's limit by memory."""
    return _uses(config, run_plan, _buckets(config, run_plan))


def limited(config: RunConfig, request: Request, layers: tuple[int, ...]) -> Request:
    """Return a request with the limits of its ranks, if the run has a limit by memory.

    A schedule with a promise keeps to it where some rank has no room for more.
    """
    if not config.parallel.planning.is_limited_by_memory or request.file is not None:
        return request
    found = request.within(rank_limits(config, request, layers))
    return _as_asked(config, found)


def rank_limits(config: RunConfig, request: Request, layers: tuple[int, ...]) -> tuple[float, ...]:
    """Return the most microbatches that every rank may have in flight, at least 1.

    The count of two plans is a straight line through their bytes. Bytes that grow by kinds of
    passes, of which now one and now another holds the most, lie below this line between them.
    """
    one = _forwards_first(config, request, layers, 1)
    if request.microbatches == 1:
        return (1.0,) * request.ranks
    several = min(request.microbatches, max(2, 2 * request.ranks))
    buckets = _buckets(config, one)
    least = _uses(config, one, buckets)
    most = _uses(config, _forwards_first(config, request, layers, several), buckets)
    parts = one.plan.chunks * one.plan.slices
    found = []
    for low, high in zip(least, most, strict=True):
        more = (high.peak - low.peak) / (several - 1)
        room = inf if more <= 0 else (low.room - low.peak) / more
        limit = 1 + max(0.0, min(room, request.microbatches - 1))
        found.append(floor(limit * parts + _NEARLY) / parts)
    return tuple(found)


def lowered(config: RunConfig, request: Request, run_plan: RunPlan) -> Request | None:
    """Return the request with lower limits of the ranks that hold too much under its plan.

    ``None``: no rank holds too much, or lower limits are not to be had.
    """
    if not config.parallel.planning.is_limited_by_memory or not request.limits:
        return None
    over = {use.rank: use for use in uses(config, run_plan) if use.is_beyond}
    if not over:
        return None
    least = uses(config, _forwards_first(config, request, run_plan.layers, 1))
    parts, limits = run_plan.plan.chunks * run_plan.plan.slices, list(request.limits)
    for rank, use in over.items():
        held = floor(limits[rank] * parts + _NEARLY)
        limits[rank] = (held - _parts_too_many(use, least[rank].peak, held - parts)) / parts
    return _as_asked(config, request.within(tuple(limits))) if min(limits) >= 1 else None


def beyond_limit(config: RunConfig, run_plan: RunPlan) -> str | None:
    """Return the reason why a plan exceeds the limit by memory; ``None``: it does not."""
    limit = memory_limit_of(config)
    if limit is None:
        return None
    worst = max(uses(config, run_plan), key=lambda use: use.peak - use.room)
    if not worst.is_beyond:
        return None
    return (
        f"{limit.in_words()}, and rank {worst.rank} holds {MEMORY.write(worst.peak)} under the "
        f"smallest plan of {run_plan.schedule} that was found: {limit.way_out(worst)}"
    )


def limit_in_words(config: RunConfig, run_plan: RunPlan) -> str | None:
    """Return the limit by memory and the microbatches that it allows; ``None``: no limit."""
    limit = memory_limit_of(config)
    if limit is None:
        return None
    if not run_plan.limits:
        return f"{limit.in_words()}; no rank of {run_plan.schedule} holds more"
    allowed = sorted(set(run_plan.limits))
    if len(allowed) == 1:
        where = f"{counted(allowed[0], 'microbatch')} in flight on every rank"
    else:
        listed = " ".join(f"{rank}:{own:g}" for rank, own in enumerate(run_plan.limits))
        where = f"so many microbatches in flight (rank:microbatches): {listed}"
    return f"{limit.in_words()}, which allows {run_plan.schedule} {where}"


def _parts_too_many(use: Use, least: float, parts: int) -> int:
    """Return by how much to lower a limit, in chunks of slices: at least by one.

    Args:
        use: the bytes of the rank under its plan.
        least: the bytes with one microbatch in flight.
        parts: chunks of slices beyond this microbatch that the limit has allowed.
    """
    of_one = (use.peak - least) / parts if parts else 0.0
    return max(1, floor((use.peak - use.room) / of_one)) if of_one > 0 else 1


def _as_asked(config: RunConfig, request: Request) -> Request:
    """Return a request with limits, or without them where they are below the schedule's promise.

    ``auto`` gives limits only to schedules that fill memory.
    """
    if TRAITS[config.parallel.pipeline_schedule].compares or config.taken:
        return as_compared(request)
    if request.schedule not in SCHEDULES:
        return request
    enough = min(request.limits) >= promised(request, request.catalogued)
    return request if enough else request.within(())


def _forwards_first(
    config: RunConfig, request: Request, layers: tuple[int, ...], microbatches: int
) -> RunPlan:
    one = RunPlan.of(config, request, layers, one_microbatch_of(request))
    plan = forwards_first(one.plan, microbatches)
    return RunPlan(plan, layers, request.costs, request.schedule, config.taken)


def _buckets(config: RunConfig, run_plan: RunPlan) -> Sequence[RankBuckets]:
    return run_buckets(config, run_plan) if config.parallel.reduces_gradients else ()


def _uses(config: RunConfig, run_plan: RunPlan, buckets: Sequence[RankBuckets]) -> list[Use]:
    limit, plan = memory_limit_of(config), run_plan.plan
    assert limit is not None, "the run has a limit"
    counts = count_ranks(config, plan_of_one(plan), run_plan.layers)
    memories = run_memory(config, plan, counts, buckets, config.parallel.gpu)
    found = peaks(run_plan.program, memories)
    return [
        limit.use(rank, peak, own)
        for rank, (peak, own) in enumerate(zip(found, memories, strict=True))
    ]
