"""Make the plan of a named schedule with any treatment of the vocabulary."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from math import floor
from typing import Final, NamedTuple, ParamSpec

from megatron.schedules.blocks.block import Block, Slot, unroll
from megatron.schedules.blocks.interlaced import interlaced
from megatron.schedules.blocks.with_vocabulary import with_vocabulary
from megatron.schedules.catalogue import SCHEDULES, TRAITS, Schedule, compared_schedules
from megatron.schedules.check import check
from megatron.schedules.held import Held, in_flight, peak_held
from megatron.schedules.plan import Plan
from megatron.schedules.plan_file import load_plan
from megatron.schedules.request import Request
from megatron.schedules.search.automatic import one_by_one
from megatron.schedules.search.bound import least_time
from megatron.schedules.search.fastest import fastest
from megatron.schedules.search.optimal import Optimum, optimal
from megatron.schedules.search.shorten import EFFORT, shorten
from megatron.schedules.timing import earliest
from megatron.schedules.treatments import Treatment

TRIALS_WITH_OWN_SEARCH: Final = 12
"""A plan without vocabulary gets its own search only if the effort allows this many trials."""

_P = ParamSpec("_P")


class Found(NamedTuple):
    """The plan made for a request.

    Attributes:
        plan: a checked plan.
        bound: a proven time that no plan within the memory limit can beat; ``None`` if there is no
            proof.
    """

    plan: Plan
    bound: float | None = None


def find_plan(request: Request) -> Found:
    """Return the checked plan that ``request`` asks for, with the bound on better plans, if known.

    Raises:
        ValueError: if the schedule exceeds the memory limit, the file holds no plan, a plan for
            another request or one that cannot be run, the costs lack a pass, or ``optimal`` is
            asked for without OR-Tools.
    """
    _check_weight_gradient(request)
    found = _found(request)
    if request.schedule != "file":  # load_plan has checked that, with the file's name in the error
        check(found.plan)
    _check_limit(request, found.plan)
    return found


def plan_for(request: Request) -> Plan:
    """Return the plan of ``find_plan``."""
    return find_plan(request).plan


def least_time_of(request: Request) -> float:
    """Return a time that no plan of ``request`` can beat; the plan itself is not made.

    Args:
        request: for a schedule that has a block, or one that has one chunk per rank and splits the
            backward.
    """
    schedule = SCHEDULES.get(request.schedule, SCHEDULES["zb-h1"])
    return least_time(_unrolled(request, schedule, 1), request.costs, request.microbatches)


def as_compared(request: Request) -> Request:
    """Return the request with which ``auto`` asks for a schedule's plan.

    ``auto`` compares plans with the memory limit itself. So the limit is left out, unless the
    schedule fills memory and keeps the limit.
    """
    schedule, limit = SCHEDULES.get(request.schedule), request.memory_limit
    if schedule is None or limit is None:
        return request
    if schedule.fills and limit >= _promised(request, schedule):
        return request
    return replace(request, memory_limit=None)


def stages_of(request: Request) -> tuple[tuple[int, int], ...]:
    """Return the (rank, chunk) of every stage without making the plan: costs may depend on them.

    Raises:
        ValueError: for ``auto``, whose stages are not known before the best schedule is, and for a
            file that holds no plan or a plan for another request.
    """
    if request.schedule == "file":
        return plan_for(request).stages
    if request.schedule == "auto":
        raise ValueError(
            "'auto' compares schedules whose last stages are on different ranks: take a treatment "
            "that spreads the output layer, or one schedule after the other"
        )
    if request.schedule in SCHEDULES:
        return _block(request, SCHEDULES[request.schedule]).stages
    return tuple((rank, 0) for rank in range(request.ranks))


def _with_arguments_of(request: Callable[_P, Request]) -> Callable[_P, Plan]:
    def make(*args: _P.args, **options: _P.kwargs) -> Plan:
        return plan_for(request(*args, **options))

    return make


make_plan: Final = _with_arguments_of(Request)
"""``plan_for`` that takes the arguments of ``Request`` instead of a ``Request``."""


def _found(request: Request) -> Found:
    match request.schedule:
        case "file":
            assert request.file is not None
            wanted = request.ranks, request.microbatches, request.vocabulary
            return Found(load_plan(request.file, *wanted))
        case "auto":
            return Found(_best(request))
        case "optimal":
            best = _optimum(request)
            return Found(best.plan, best.bound)
        case "zb-auto":
            assert request.memory_limit is not None
            return Found(_within(request, request.memory_limit))
        case name:
            return Found(_from_block(request, SCHEDULES[name]))


def _from_block(request: Request, schedule: Schedule, followed: bool = False) -> Plan:
    """Return the plan of a schedule that has a block.

    If it is ``followed``, it is only the guide for the same plan with vocabulary passes.
    """
    plan = _unrolled(request, schedule, request.microbatches)
    if not request.shortened:
        return plan
    without = None
    small = sum(map(len, plan.rows)) <= EFFORT // TRIALS_WITH_OWN_SEARCH
    overlapped = plan.treatment.is_sharded and not plan.treatment.synchronous
    if schedule.split and small and overlapped:
        without = _from_block(_without_vocabulary(request), schedule, followed=True)
    limits = _limits(plan, _room(request, schedule))
    return shorten(
        plan,
        request.costs,
        limits,
        schedule.kept,
        schedule.searched,
        without,
        cools_down=not followed,
    )


def _without_vocabulary(request: Request) -> Request:
    """Return the request for a plan whose memory leaves room for what the barriers delay."""
    limit = request.memory_limit
    limit = None if limit is None else max(limit - request.treatment.delay, 1.0)
    return replace(request, vocabulary="none", memory_limit=limit)


def _promised(request: Request, schedule: Schedule) -> float:
    """Return the microbatches that a rank may hold by the schedule's promise and its barriers."""
    chunks = request.chunks or schedule.chunks
    promise = schedule.promise(request.ranks, request.microbatches, chunks)
    return promise + request.treatment.delay


def _room(request: Request, schedule: Schedule) -> float:
    """Return the microbatches that a rank may hold while its plan is shortened."""
    promised = _promised(request, schedule)
    if not schedule.fills or request.memory_limit is None:
        return promised
    return max(promised, request.memory_limit)


def _unrolled(request: Request, schedule: Schedule, microbatches: int) -> Plan:
    """Return the plan in the order of the schedule's block, with the requested treatment."""
    block = _block(request, schedule)
    if request.split_backward and not schedule.split:
        block = _split(block)
    return unroll(_treated(block, request.treatment), microbatches)


def _block(request: Request, schedule: Schedule) -> Block:
    chunks = request.chunks or schedule.chunks
    return schedule.block(request.ranks, request.microbatches, chunks)


def _treated(block: Block, treatment: Treatment) -> Block:
    """Return ``block`` with the vocabulary passes of a treatment."""
    if not treatment.is_sharded:
        return block
    insert = interlaced if treatment.synchronous else with_vocabulary
    return insert(block, treatment)


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


def _limits(plan: Plan, microbatches: float) -> list[Held]:
    """Return what every rank may hold while the plan is shortened.

    The limit of activations is ``microbatches``. Without W there is little to fill gaps with, so
    the later ranks, which hold less, may exceed their own peak by one chunk only. With W, a rank
    may hold the exponentials of one more microbatch, so that T too can wait for idle time. All
    ranks look embeddings up for the first stage, but run their own F later, up to one microbatch
    for each rank. So ranks without the first stage may hold embeddings of p more microbatches.
    """
    promised = float(floor(microbatches * plan.chunks + 1e-9))
    limits = []
    for rank, row in enumerate(plan.rows):
        peak = peak_held(plan, row)
        ahead = 0 if rank == plan.stages[0][0] else plan.ranks
        activations = promised if plan.split_backward else min(promised, peak.activations + 1)
        exponentials = peak.exponentials + plan.split_backward
        limits.append(Held(activations, exponentials, peak.embeddings + ahead))
    return limits


def _within(request: Request, limit: float) -> Plan:
    """Return the best plan with one chunk per rank and a split backward within a memory limit."""
    p, m = request.ranks, request.microbatches
    blocks = [SCHEDULES[name].block(p, m, 1) for name in ("zb-h2", "zb-h1")]
    plans = [unroll(_treated(block, request.treatment), m) for block in blocks]
    fitting = (plan for plan in plans if max(in_flight(plan)) <= limit)
    plan = next(fitting, one_by_one(plans[0]))
    return shorten(plan, request.costs, _limits(plans[0], limit), searched=True)


def _optimum(request: Request) -> Optimum:
    """Return the shortest plan with one chunk per rank that CP-SAT finds, and its proven bound."""
    limit = request.memory_limit
    limit = float(request.ranks + request.treatment.delay) if limit is None else limit
    hint = _within(request, limit)
    return optimal(hint, request.costs, [limit] * request.ranks, seconds=request.seconds)


@dataclass(frozen=True)
class _ComparedRequest:
    """A schedule that ``auto`` compares.

    Attributes:
        request: asks for its plan, whether the plan fits the memory limit or not.
    """

    request: Request

    @cached_property
    def plan(self) -> Plan:
        request = self.request
        if request.schedule in SCHEDULES:
            return _from_block(request, SCHEDULES[request.schedule])
        assert request.memory_limit is not None
        return _within(request, request.memory_limit)

    @cached_property
    def time(self) -> float:
        return earliest(self.plan, self.request.costs).end

    @cached_property
    def least_time(self) -> float:
        return least_time_of(self.request)

    def fits(self) -> bool:
        limit = self.request.memory_limit
        return limit is None or max(in_flight(self.plan)) <= limit


def _best(request: Request) -> Plan:
    """Return the plan that ends first among all schedules that fit the limit; zb-auto fits any."""
    candidates = []
    for name in compared_schedules(request.memory_limit):
        costs = request.costs.per_chunk(TRAITS[name].chunks)
        candidates.append(
            _ComparedRequest(replace(request, schedule=name, costs=costs, chunks=None))
        )
    best = fastest(candidates, _ComparedRequest.fits)
    assert best is not None
    return best.plan


def _check_limit(request: Request, plan: Plan) -> None:
    held, limit = max(in_flight(plan, request.traits.kept)), request.memory_limit
    if limit is not None and held > limit + 1e-9:
        raise ValueError(
            f"{request.schedule} holds up to {held:g} microbatches a rank, more than the memory "
            f"limit of {limit:g}: raise it to that, or take 'auto', which looks for one that fits"
        )


def _check_weight_gradient(request: Request) -> None:
    """Raise if the plan needs W but the costs lack it: its share of B is not to be guessed."""
    splits = request.traits.split or request.split_backward
    whole = ", ".join(name for name, schedule in SCHEDULES.items() if not schedule.split)
    if splits and "W" not in request.costs.passes:
        raise ValueError(
            f"{request.schedule} splits the backward, and the costs have no W: give W=TIME, and "
            "as B the input gradient alone (--measured-costs: measure a run that splits the "
            f"backward), or take a schedule that does not split it: {whole}"
        )
