"""The plan of a schedule that has a building block: unroll it, then search and lengthen it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from math import ceil, floor, gcd, inf
from typing import Final, NamedTuple

from megatron.schedules.blocks.block import Block, Slot, unroll
from megatron.schedules.blocks.for_pairs import NoRoomError, for_pairs
from megatron.schedules.blocks.interlaced import interlaced
from megatron.schedules.blocks.with_slices import units_in_flight, with_slices
from megatron.schedules.blocks.with_vocabulary import with_vocabulary
from megatron.schedules.catalogue import SCHEDULES, Schedule
from megatron.schedules.held import Held, fits, in_flight, peak_held
from megatron.schedules.plan import Plan, with_recomputation
from megatron.schedules.request import Request
from megatron.schedules.search.automatic import one_by_one
from megatron.schedules.search.lengthen import PERIODS, Target, lengthened
from megatron.schedules.search.shorten import shorten
from megatron.schedules.search.watch import Watch
from megatron.schedules.timing import earliest_end

LATE: Final = (0.0, 0.25, 0.5, 0.75)
"""Shares of an interval by which S may wait for the output of the last stage."""

GAIN: Final = 0.005
"""Share of the time that a later S has to save."""

EMBEDDINGS: Final = 16
"""Microbatches by which the search for a plan without W may move IF ahead and IB behind. Each
microbatch takes an activation [n, h] on its rank meanwhile. At p = 32 it held 64 of them for 0.2 %
of the time."""

STRETCHED: Final = 1.0
"""Microbatches in flight that pairs may cost where the request has no memory limit."""

SEARCHED_WHOLE: Final = 25_000
"""A plan of more passes is searched with fewer microbatches, and then lengthened."""

JOINED_WHOLE: Final = 5_000
"""As ``SEARCHED_WHOLE``, for plans with pairs: they are walked once for each kind of pair."""

_CACHED: Final = 64
"""Blocks, and plans of one microbatch, that are kept: a run asks for the same several times."""


class Sought(NamedTuple):
    """The plan that a search looks for.

    Attributes:
        microbatches: microbatches of the plan that is searched.
        target: how to lengthen the found plan, if it has fewer microbatches than wanted; else
            ``None``.
    """

    microbatches: int
    target: Target | None = None


def plan_from_block(request: Request, schedule: Schedule, watch: Watch) -> Plan:
    """Return the best plan found for a schedule that has a block; ``check`` is not called."""
    if not request.shortened:
        return _unrolled(request, schedule, request.microbatches)
    held = ceil(request.memory_limit or 0) if schedule.fills else 0
    sought = _sought(request, _treated_block(request, schedule), held)
    return _lengthened(request, sought, lambda sought: _searched(request, schedule, sought, watch))


def plan_within(request: Request, limit: float, watch: Watch) -> Plan:
    """Return the best plan with one chunk per rank and a split backward within a memory limit.

    If the request has limits of its ranks, they hold instead, and ``limit`` is the largest.
    """
    sought = _sought(request, _treated_block(request, SCHEDULES["zb-h2"]), ceil(limit))
    limits = request.rank_limits or (limit,) * request.ranks
    return _lengthened(
        request, sought, lambda sought: _searched_within(request, limits, sought, watch)
    )


def block_of(request: Request, schedule: Schedule) -> Block:
    """Return the schedule's block of whole microbatches, without vocabulary passes.

    It has the schedule's own backward. If it depends on the number of microbatches, it is made for
    the number of units.
    """
    chunks = request.chunks or schedule.chunks
    return schedule.block(request.ranks, request.units, chunks)


def orders_of_block(request: Request, schedule: Schedule) -> Iterator[Plan]:
    """Yield plans in the order of a schedule's block, for pairs, which want results to come late.

    With vocabulary passes there are two: in the second, S waits somewhat longer for its input.
    """
    plain = replace(request, shortened=False)
    yield _unrolled(plain, schedule, request.microbatches)
    treatment = request.treatment
    if treatment.is_sharded and not treatment.synchronous:
        block = with_vocabulary(_own_block(request, schedule), treatment, LATE[1])
        sliced = with_slices(block, request.slices)
        yield _recomputing(request, unroll(sliced, request.microbatches))


def stretched_plans(request: Request, schedule: Schedule, watch: Watch) -> Iterator[Plan]:
    """Yield plans of a schedule whose block is stretched for pairs, if there is memory for them.

    They may hold as much as the memory limit allows, and one microbatch more than the schedule
    promises without a limit. The passes are placed as if all waits were hidden.
    """
    if request.treatment.synchronous or request.slices > 1:
        return  # a pair would part S from T, or delay the next slice

    @cache
    def block(p: int, m: int, v: int) -> Block:
        return for_pairs(schedule.block(p, m, v))

    try:
        longer = _unrolled(request, replace(schedule, block=block), request.microbatches)
    except NoRoomError:
        return
    held = in_flight(longer)
    room = promised(request, schedule) + STRETCHED
    rooms = request.limits or (room,) * request.ranks
    if any(own > most for own, most in zip(held, rooms, strict=True)):
        return
    without = max(held) - request.treatment.delay
    stretched = replace(schedule, block=block, promise=lambda p, m, v: without)
    hidden = replace(request, costs=request.costs.without_waits())
    yield plan_from_block(hidden, stretched, watch)
    yield from orders_of_block(request, stretched)


def sought_for_pairs(request: Request, schedule: Schedule) -> Sought:
    """Return the plan to which pairs are given: one of all microbatches, or a shorter one.

    A stretched block lives longer than the schedule's own, and pairs of a kind that shorten the
    steady state may lengthen the rest. So the shorter plan has twice as many microbatches for
    warm-up and cool-down as other shorter plans, and twice as many for the steady state.
    """
    return _sought(request, _treated_block(request, schedule), whole=JOINED_WHOLE, room=2)


@lru_cache(_CACHED)
def one_microbatch(request: Request, schedule: Schedule) -> Plan:
    """Return the plan of a schedule for one microbatch.

    Its S is not timed by the costs of the request: without a steady state there is nothing to time.
    """
    return _recomputing(request, unroll(_plain_block(request, schedule), 1))


def _sought(
    request: Request, block: Block, held: int = 0, *, whole: int = SEARCHED_WHOLE, room: int = 1
) -> Sought:
    """Return the plan to search: one of all microbatches, or a shorter one if they are many.

    The shorter plan has enough microbatches for a warm-up and a cool-down, which together take as
    long as the block, and for a steady state between them. Repeating the steady state may cost idle
    time, so the shorter plan is used only if it has at most half of the microbatches.

    Args:
        request: the wanted plan.
        block: the block from which the search starts.
        held: microbatches that a rank may hold, if it may hold more than in the block.
        whole: passes of the largest plan that is not made shorter.
        room: how many times as many microbatches as needed a shorter plan has.
    """
    m, n = request.microbatches, request.slices
    if m * n * sum(map(len, block.rows)) <= whole:
        return Sought(m)
    slots = [slot for row in block.rows for slot in row]
    lifetime = max(slot.end for slot in slots) - min(slot.start for slot in slots)
    units = max(block.group, 1)
    group = units // gcd(units, n)  # the fewest microbatches whose units fill whole groups
    ends = max(ceil(ceil(lifetime / block.period) * units / n), held)
    periods = (group,) if block.group else PERIODS
    step = max(periods)
    steady = 2 * group if block.group else max(step, ceil(request.ranks / n))
    # Windows are repeated whole, so the missing microbatches must be a multiple of each period.
    needed = room * (ends + steady)
    short = needed + (m - needed) % step
    return Sought(short, Target(m, periods)) if 2 * short <= m else Sought(m)


def _lengthened(request: Request, sought: Sought, search: Callable[[Sought], Plan]) -> Plan:
    """Return the plan that ``search`` finds, with all microbatches of the request.

    A plan without a steady state that can be repeated is searched as a whole.
    """
    plan = search(sought)
    if sought.target is None:
        return plan
    longer = lengthened(plan, request.costs, sought.target)
    return search(Sought(request.microbatches)) if longer is None else longer


def promised(request: Request, schedule: Schedule) -> float:
    """Return the microbatches that a rank may hold.

    They are those of the schedule's promise, and those that barriers of the treatment add.
    """
    chunks = request.chunks or schedule.chunks
    promise = schedule.promise(request.ranks, request.units, chunks) + request.treatment.delay
    if request.slices == 1:
        return promise
    return (promise + units_in_flight(block_of(request, schedule), request.slices)) / request.slices


def _rooms(request: Request, schedule: Schedule) -> list[float]:
    """Return the microbatches that each rank may hold while its plan is shortened."""
    least = promised(request, schedule)
    if not schedule.fills or not request.limits:
        return [least] * request.ranks
    return [max(least, limit) for limit in request.limits]


def _searched(
    request: Request, schedule: Schedule, sought: Sought, watch: Watch, followed: bool = False
) -> Plan:
    """Return the best plan found of a schedule that has a block.

    If ``followed``, the plan has no vocabulary passes, and only guides the search for the same plan
    with them.
    """
    plan = _unrolled(request, schedule, sought.microbatches)
    without = None
    overlapped = plan.treatment.is_sharded and not plan.treatment.synchronous
    if schedule.split and overlapped:
        without = _searched(_without_vocabulary(request), schedule, sought, watch, followed=True)
    guided = followed or without is not None
    watch.begin(request.schedule, 1 if followed else 1 + guided, 1 + guided)
    return shorten(
        plan,
        request.costs,
        _limits(plan, _rooms(request, schedule), request.recompute_ahead),
        schedule.kept,
        schedule.searched,
        without,
        followed,
        sought.target,
        watch,
        request.quick,
    )


def _without_vocabulary(request: Request) -> Request:
    """Return the request for the same plan without vocabulary passes.

    Its memory limits are lower by the microbatches that the barriers keep in flight.
    """
    barriers = request.treatment.delay / request.slices
    limits = tuple(max(limit - barriers, 1.0) for limit in request.limits)
    return replace(request.within(limits), vocabulary="none")


def _searched_within(
    request: Request, limits: Sequence[float], sought: Sought, watch: Watch
) -> Plan:
    """Return the best plan found within the memory limits of the ranks."""
    schedules = [SCHEDULES[name] for name in ("zb-h2", "zb-h1")]
    plans = [_unrolled(request, schedule, sought.microbatches) for schedule in schedules]
    fitting = (plan for plan in plans if fits(plan, limits))
    plan = next(fitting, one_by_one(plans[0]))
    watch.begin(request.schedule)
    return shorten(
        plan,
        request.costs,
        _limits(plans[0], limits, request.recompute_ahead),
        searched=True,
        target=sought.target,
        watch=watch,
        quick=request.quick,
    )


def _unrolled(request: Request, schedule: Schedule, microbatches: int) -> Plan:
    """Return the plan in the order of the schedule's block, with the requested treatment."""
    return _recomputing(request, unroll(_treated_block(request, schedule), microbatches))


def _recomputing(request: Request, plan: Plan) -> Plan:
    return plan if request.recompute_ahead is None else with_recomputation(plan)


@lru_cache(_CACHED)
def _treated_block(request: Request, schedule: Schedule) -> Block:
    """Return the schedule's block with the requested treatment, backward and slices."""
    treatment = request.treatment
    if treatment.is_sharded and not treatment.synchronous and request.shortened:
        return _with_timely_output(_own_block(request, schedule), request)
    return _plain_block(request, schedule)


def _plain_block(request: Request, schedule: Schedule) -> Block:
    """Return the block of ``_treated_block`` with every S where the schedule's own times put it."""
    block, treatment = _own_block(request, schedule), request.treatment
    if treatment.synchronous:
        block = interlaced(block, treatment)
    elif treatment.is_sharded:
        block = with_vocabulary(block, treatment)
    return with_slices(block, request.slices)


def _own_block(request: Request, schedule: Schedule) -> Block:
    """Return the schedule's block with the requested split of the backward."""
    block = block_of(request, schedule)
    return _split(block) if request.split_backward and not schedule.split else block


def _with_timely_output(block: Block, request: Request) -> Block:
    """Return a block with vocabulary passes in which S runs as soon as its input has arrived.

    Real passes take other times than in the block. So several start times of S are tried with the
    costs of the request, on just enough microbatches to show a steady state.
    """
    n = request.slices

    def treated(late: float) -> Block:
        return with_slices(with_vocabulary(block, request.treatment, late), n)

    few = min(request.microbatches, ceil((3 * request.ranks + max(block.group, 1)) / n))
    best = treated(0.0)
    if few * n < 2 * request.ranks:
        return best
    least = (1 - GAIN) * earliest_end(unroll(best, few), request.costs)
    for late in LATE[1:]:
        tried = treated(late)
        taken = earliest_end(unroll(tried, few), request.costs)
        if taken < least:
            best, least = tried, taken
    return best


def _split(block: Block) -> Block:
    """Return ``block`` with every B of two units split into B and W."""

    def parts(slot: Slot) -> tuple[Slot, ...]:
        if slot.kind != "B":
            return (slot,)
        half = slot.duration / 2
        weights = Slot(slot.start + half, half, "W", slot.chunk)
        return slot._replace(duration=half), weights

    rows = (tuple(part for slot in row for part in parts(slot)) for row in block.rows)
    return replace(block, rows=tuple(rows))


def _limits(plan: Plan, microbatches: Sequence[float], recomputed: int | None) -> list[Held]:
    """Return the most that every rank may hold while the plan is shortened.

    ``microbatches`` are the ranks' limits of activations. Without W there is little to fill gaps
    with, so the later ranks, which hold less, may exceed their own peak by one chunk only. With W,
    a rank may hold the exponentials of one more unit, so that T can wait for idle time. All ranks
    look embeddings up for the first stage, but run their own F later, up to one unit for each rank.
    So ranks without the first stage may hold embeddings of p more units. IB may wait for idle time,
    so a rank may hold gradients of more units. Without W, embeddings and gradients may each exceed
    their peak in the order of the block by ``EMBEDDINGS`` at most. ``recomputed`` is the limit of
    chunks between R and B.
    """
    waiting = inf if plan.split_backward else EMBEDDINGS * plan.slices
    limits = []
    for rank, row in enumerate(plan.rows):
        # A promise that is a whole number of chunks may be just below it as a float.
        promised = float(floor(microbatches[rank] * plan.chunks * plan.slices + 1e-9))
        peak = peak_held(plan, row)
        early = 0 if rank == plan.stages[0][0] else min(plan.ranks, waiting)
        activations = promised if plan.split_backward else min(promised, peak.activations + 1)
        exponentials = peak.exponentials + plan.split_backward
        embeddings, gradients = peak.embeddings + early, peak.gradients + waiting
        limits.append(Held(activations, exponentials, embeddings, recomputed or 0, gradients))
    return limits
