"""Make the plan of a named schedule with any treatment of the vocabulary."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, NamedTuple, ParamSpec

from megatron.schedules.catalogue import SCHEDULES, TRAITS, compared_schedules
from megatron.schedules.check import check
from megatron.schedules.counted import counted
from megatron.schedules.from_block import (
    block_of,
    one_microbatch,
    orders_of_block,
    plan_from_block,
    plan_within,
    promised,
    sought_for_pairs,
    stretched_plans,
)
from megatron.schedules.held import fits, in_flight
from megatron.schedules.pairs import joined
from megatron.schedules.plan import Plan, with_recomputation
from megatron.schedules.plan_file import load_plan
from megatron.schedules.request import Request
from megatron.schedules.search.bound import least_time
from megatron.schedules.search.fastest import fastest
from megatron.schedules.search.lengthen import lengthened
from megatron.schedules.search.optimal import Optimum, optimal
from megatron.schedules.search.watch import Watch
from megatron.schedules.timing import earliest_end

_P = ParamSpec("_P")


class Found(NamedTuple):
    """The plan made for a request.

    Attributes:
        plan: a checked plan.
        schedule: the name of the plan's schedule; for ``auto``, the schedule that ``auto`` has
            chosen.
        bound: a proven time that no plan within the memory limit can beat; ``None`` if there is no
            proof.
    """

    plan: Plan
    schedule: str
    bound: float | None = None


def find_plan(request: Request, watch: Watch | None = None) -> Found:
    """Return the checked plan that ``request`` asks for, and the time that no plan can beat.

    The time is ``None`` unless a search has proven it.

    Args:
        request: the wanted plan.
        watch: ends the search when its time is up, and shows its progress.

    Raises:
        ValueError: if the schedule exceeds the memory limit; if the file holds no plan, a plan for
            another request, or a plan that cannot be run; if the costs lack a pass; or if
            ``optimal`` is requested and OR-Tools is not installed.
    """
    _check_weight_gradient(request)
    find = _found_joined if request.joined else _found
    found = find(request, Watch() if watch is None else watch)
    if request.schedule != "file":  # load_plan has checked that, with the file's name in the error
        check(found.plan)
    _check_limit(request, found.plan)
    return found


def plan_for(request: Request, watch: Watch | None = None) -> Plan:
    """Return the plan of ``find_plan``."""
    return find_plan(request, watch).plan


def one_microbatch_of(request: Request) -> Plan:
    """Return a plan of ``request`` for one microbatch, without any search.

    Args:
        request: asks for a schedule that has a block, or for one with one chunk per rank and a
            split backward.
    """
    has_block = request.schedule in SCHEDULES
    return one_microbatch(request, request.catalogued if has_block else SCHEDULES["zb-h1"])


def least_time_of(request: Request) -> float:
    """Return a time that no plan of ``request`` can beat; the plan itself is not made.

    Args:
        request: as for ``one_microbatch_of``.
    """
    costs = request.costs.without_waits() if request.joined else request.costs
    return least_time(one_microbatch_of(request), costs, request.microbatches)


def as_compared(request: Request) -> Request:
    """Return the request with which ``auto`` asks for a schedule's plan.

    ``auto`` itself checks whether a plan keeps the memory limit. So the request has no limit,
    unless the schedule is one that fills memory up to its limit.
    """
    limits = request.limits
    if request.schedule not in SCHEDULES or not limits:
        return request
    schedule = request.catalogued
    if schedule.fills and min(limits) >= promised(request, schedule):
        return request
    return request.within(())


def stages_of(request: Request) -> tuple[tuple[int, int], ...]:
    """Return the (rank, chunk) of every stage without the plan, because costs may depend on stages.

    Raises:
        ValueError: for ``auto``, whose stages are known only when its best schedule is found; or
            for a file that holds no plan or a plan for another request.
    """
    if request.schedule == "file":
        return plan_for(request).stages
    if request.schedule == "auto":
        raise ValueError(
            "'auto' compares schedules whose last stages are on different ranks: take a treatment "
            "that spreads the output layer, or one schedule after the other"
        )
    if request.schedule in SCHEDULES:
        return block_of(request, request.catalogued).stages
    return tuple((rank, 0) for rank in range(request.ranks))


def _with_arguments_of(request: Callable[_P, Request]) -> Callable[_P, Plan]:
    def make(*args: _P.args, **options: _P.kwargs) -> Plan:
        return plan_for(request(*args, **options))

    return make


make_plan: Final = _with_arguments_of(Request)
"""``plan_for`` that takes the arguments of ``Request`` instead of a ``Request``."""


def _found(request: Request, watch: Watch) -> Found:
    match request.schedule:
        case "file":
            assert request.file is not None
            wanted = request.ranks, request.microbatches, request.vocabulary, request.slices
            plan = load_plan(request.file, *wanted)
            return Found(
                plan if request.recompute_ahead is None else with_recomputation(plan), "file"
            )
        case "auto":
            return _best(request, watch)
        case "optimal":
            best = _optimum(request, watch)
            slices = request.costs.slices  # if they differ, their order proves nothing
            alike = all(own == slices[0] for own in slices)
            return Found(best.plan, "optimal", best.bound if alike else None)
        case "zb-auto":
            assert request.memory_limit is not None
            return Found(plan_within(request, request.memory_limit, watch), "zb-auto")
        case name:
            return Found(plan_from_block(request, request.catalogued, watch), name)


def _found_joined(request: Request, watch: Watch) -> Found:
    """Return the plan with pairs, or the plan without pairs if pairs make it longer."""
    hidden = replace(request, costs=request.costs.without_waits())
    if request.schedule not in SCHEDULES:
        found = _found(hidden, watch)
        costs = request.costs
        if request.traits.compares:
            costs = costs.per_chunk(found.plan.chunks)
        if found.schedule not in SCHEDULES:
            plan = joined(found.plan, costs, joins_all=request.joins_all)
            plain = _found(request, watch)
            is_shorter = earliest_end(plan, costs) <= earliest_end(plain.plan, costs)
            return found._replace(plan=plan, bound=None) if plan.pairs and is_shorter else plain
        request = replace(request, schedule=found.schedule, costs=costs)
    schedule, costs = request.catalogued, request.costs
    plans = _lengthened_with_pairs(request, watch) or _with_pairs(request, watch)
    best = min(plans, key=lambda plan: (earliest_end(plan, costs), max(in_flight(plan))))
    if best.pairs:
        least = least_time(one_microbatch(request, schedule), costs, request.microbatches)
        if earliest_end(best, costs) <= least:
            return Found(best, request.schedule)  # no plan without pairs is shorter
    plain = _found(request, watch)
    if not best.pairs or earliest_end(plain.plan, costs) < earliest_end(best, costs):
        return plain
    return Found(best, request.schedule)


def _lengthened_with_pairs(request: Request, watch: Watch) -> list[Plan]:
    """Return plans with pairs whose pairs were chosen for fewer microbatches; maybe none."""
    sought = sought_for_pairs(request, request.catalogued)
    if sought.target is None:
        return []
    few = replace(request, microbatches=sought.microbatches)
    longer = (lengthened(plan, request.costs, sought.target) for plan in _with_pairs(few, watch))
    return [plan for plan in longer if plan is not None]


def _with_pairs(request: Request, watch: Watch) -> list[Plan]:
    """Return plans of a schedule with a block, with all pairs that do not lengthen them.

    The search places passes as if all waits were hidden, because most passes of a plan with pairs
    are in one. It may part passes that the block has side by side, so the order of the block is
    tried too, and then the block stretched for pairs (``blocks.for_pairs``).
    """
    schedule, kept = request.catalogued, request.traits.kept
    hidden = replace(request, costs=request.costs.without_waits())
    searched = plan_from_block(hidden, schedule, watch)
    limit = max(in_flight(searched, kept))
    orders = orders_of_block(request, schedule)
    tried = [searched, *(plan for plan in orders if max(in_flight(plan, kept)) <= limit)]
    tried.extend(stretched_plans(request, schedule, watch))
    apart = dict.fromkeys(tried)  # the search often leaves a block's order as it is
    return [joined(plan, request.costs, joins_all=request.joins_all) for plan in apart]


def _optimum(request: Request, watch: Watch) -> Optimum:
    """Return the shortest plan with one chunk per rank that CP-SAT finds, and its proven bound."""
    if request.limits:
        limit = min(request.limits)
        request = request.within((limit,) * request.ranks)
    else:
        units = request.ranks + request.treatment.delay + request.slices - 1
        limit = units / request.slices
    hint = plan_within(request, limit, watch)
    return optimal(hint, request.costs, limit, seconds=request.seconds)


@dataclass(frozen=True)
class _ComparedRequest:
    """A schedule that ``auto`` compares.

    Attributes:
        request: asks for the schedule's plan, whether that plan fits the memory limit or not.
        watch: ends the search when its time is up, and shows its progress.
    """

    request: Request
    watch: Watch

    @cached_property
    def plan(self) -> Plan:
        request = self.request
        self.watch.next_plan()
        if request.schedule in SCHEDULES:
            return plan_from_block(request, request.catalogued, self.watch)
        assert request.memory_limit is not None
        return plan_within(request, request.memory_limit, self.watch)

    @cached_property
    def time(self) -> float:
        return earliest_end(self.plan, self.request.costs)

    @cached_property
    def least_time(self) -> float:
        return least_time_of(self.request)

    @cached_property
    def in_flight(self) -> float:
        return max(in_flight(self.plan))

    def tell(self) -> None:
        held = counted(self.in_flight, "microbatch in flight")
        fault = "" if self.fits() else ": too many"
        time = f"time {self.time:.6g} in the unit of the costs"
        self.watch.planned(self.request.schedule, f"{time}, {held}{fault}")

    def fits(self) -> bool:
        limits = self.request.limits
        return not limits or fits(self.plan, limits)


def _best(request: Request, watch: Watch) -> Found:
    """Return the plan that ends first among all that fit the limit; zb-auto fits every limit."""
    candidates = []
    for name in compared_schedules(request.memory_limit):
        costs = request.costs.per_chunk(TRAITS[name].chunks)
        candidates.append(
            _ComparedRequest(replace(request, schedule=name, costs=costs, chunks=None), watch)
        )
    watch.expect(len(candidates))
    best = fastest(
        candidates,
        _ComparedRequest.fits,
        is_over=lambda: watch.is_over,
        made=_ComparedRequest.tell,
    )
    assert best is not None
    return Found(best.plan, best.request.schedule)


def _check_limit(request: Request, plan: Plan) -> None:
    if not request.limits:
        return
    known = zip(in_flight(plan, request.traits.kept), request.limits, strict=True)
    held, limit = max(known, key=lambda pair: (pair[0] - pair[1], pair[0]))
    if held > limit + 1e-9:
        raise ValueError(
            f"{request.schedule} holds up to {held:g} microbatches a rank, more than the memory "
            f"limit of {limit:g}: raise it to that, or take 'auto', which looks for one that fits"
        )


def _check_weight_gradient(request: Request) -> None:
    """Raise if the plan needs W but the costs lack W: nobody can guess the share of B that is W."""
    splits = request.traits.split or request.split_backward
    whole = ", ".join(name for name, schedule in SCHEDULES.items() if not schedule.split)
    if splits and "W" not in request.costs.passes:
        raise ValueError(
            f"{request.schedule} splits the backward, and the costs have no W: give W=TIME, and "
            "as B the input gradient alone (--measured-costs: measure a run that splits the "
            f"backward), or take a schedule that does not split it: {whole}"
        )
