"""Make the plan that a name stands for, with any treatment of the vocabulary."""

from dataclasses import replace
from math import floor, inf
from pathlib import Path
from typing import Final

from megatron.schedules.automatic import one_by_one
from megatron.schedules.block import Block, Slot, unroll
from megatron.schedules.catalogue import SCHEDULES, Schedule
from megatron.schedules.check import check
from megatron.schedules.costs import UNIT_COSTS, Costs
from megatron.schedules.interlaced import interlaced
from megatron.schedules.memory import Held, in_flight, peak_held
from megatron.schedules.optimal import Optimum, optimal
from megatron.schedules.plan import VOCABULARY_BARRIERS, Plan
from megatron.schedules.request import (
    DEFAULT_SECONDS,
    Request,
    refuse,
)
from megatron.schedules.tighten import EFFORT, tighten
from megatron.schedules.timing import earliest
from megatron.schedules.vocabulary import with_vocabulary

TRIALS_WITH_GUIDE: Final = 12
"""Trials that the effort must allow for a plan without vocabulary to be worth its own search."""


def make_plan(
    schedule: str,
    vocabulary: str,
    ranks: int,
    microbatches: int,
    costs: Costs = UNIT_COSTS,
    *,
    chunks: int | None = None,
    memory_limit: float | None = None,
    split_backward: bool = False,
    file: Path | None = None,
    seconds: float = DEFAULT_SECONDS,
    tightened: bool = True,
) -> Plan:
    """Return the checked plan of a schedule with a treatment of the vocabulary.

    The arguments are those of ``Request``.

    Raises:
        ValueError: for an unknown name, a count below 1, options that the schedule has no use for,
            or a memory limit that it exceeds.
    """
    request = Request(
        schedule,
        vocabulary,
        ranks,
        microbatches,
        costs,
        chunks,
        memory_limit,
        split_backward,
        file,
        seconds,
        tightened,
    )
    refuse(request)
    plan = _make(request)
    if schedule not in ("file", "optimal"):
        check(plan)
    _check_limit(request, plan)
    return plan


def kept_share(schedule: str) -> float:
    """Return the share of the activations that ``schedule`` counts as held from B to W."""
    return SCHEDULES[schedule].kept if schedule in SCHEDULES else 1.0


def optimum(request: Request) -> Optimum:
    """Return the shortest plan of one chunk a rank that CP-SAT finds, and what it proves.

    Raises:
        ValueError: if OR-Tools is missing, or the limit is too low for any plan.
    """
    refuse(request)
    limit = request.memory_limit
    limit = float(request.ranks + request.barriers) if limit is None else limit
    hint = _within(request, limit)
    return optimal(hint, request.costs, [limit] * request.ranks, seconds=request.seconds)


def _make(request: Request) -> Plan:
    if request.schedule == "file":
        return _from_file(request)
    if request.schedule == "auto":
        return _best(request)
    if request.schedule == "optimal":
        return optimum(request).plan
    if request.schedule == "zb-auto":
        assert request.memory_limit is not None
        return _within(request, request.memory_limit)
    return _from_block(request, SCHEDULES[request.schedule])


def _from_block(request: Request, schedule: Schedule) -> Plan:
    p, m, v = request.ranks, request.microbatches, _chunks(request, schedule)
    block = schedule.block(p, m, v)
    if request.split_backward and not schedule.split:
        block = _split(block)
    plan = unroll(_treated(block, request.vocabulary), m)
    if not request.tightened:
        return plan
    limits = _limits(plan, schedule.promise(p, m, v) + request.barriers, schedule.split)
    guide = None
    small = sum(map(len, plan.rows)) <= EFFORT // TRIALS_WITH_GUIDE
    if schedule.split and small and plan.barriers is not None and not plan.synchronous:
        guide = _from_block(replace(request, vocabulary="none"), schedule)
    return tighten(plan, request.costs, limits, schedule.kept, schedule.searched, guide)


def _chunks(request: Request, schedule: Schedule) -> int:
    """Return the chunks of a rank, refusing a number that the schedule cannot have."""
    if schedule.chunks is None:
        chunks = 2 if request.chunks is None else request.chunks
        if chunks < 2:
            raise ValueError(
                f"{request.schedule} takes 2 chunks a rank or more, got {chunks}: 1f1b takes 1"
            )
        return chunks
    if request.chunks not in (None, schedule.chunks):
        raise ValueError(
            f"{request.schedule} has {schedule.chunks} chunks a rank, not {request.chunks}: "
            "'interleaved' takes any number"
        )
    return schedule.chunks


def _treated(block: Block, vocabulary: str) -> Block:
    """Return ``block`` with the vocabulary passes of a treatment."""
    if vocabulary == "interlaced":
        return interlaced(block)
    barriers = VOCABULARY_BARRIERS[vocabulary]
    return block if barriers is None else with_vocabulary(block, barriers)


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


def _limits(plan: Plan, microbatches: float, split: bool) -> list[Held]:
    """Return what every rank may hold: ``microbatches``, and of the rest what it does anyway.

    Without W there is little to fill gaps with, and the later ranks keep to the less that they
    hold, give or take a chunk. With W, one microbatch of exponentials more lets T wait for idle
    time as well. Only the first stage keeps embeddings: the other ranks must look them up that much
    earlier before their own F as it comes later, up to one microbatch a rank.
    """
    promised = float(floor(microbatches * plan.chunks + 1e-9))
    limits = []
    for rank, row in enumerate(plan.rows):
        peak = peak_held(plan, row)
        ahead = 0 if rank == plan.stages[0][0] else plan.ranks
        activations = promised if split else min(promised, peak.activations + 1)
        limits.append(Held(activations, peak.exponentials + split, peak.embeddings + ahead))
    return limits


def _within(request: Request, limit: float) -> Plan:
    """Return the best plan of one chunk a rank, the backward split, within a limit."""
    p, m = request.ranks, request.microbatches
    blocks = [SCHEDULES[name].block(p, m, 1) for name in ("zb-h2", "zb-h1")]
    plans = [unroll(_treated(block, request.vocabulary), m) for block in blocks]
    fitting = (plan for plan in plans if max(in_flight(plan)) <= limit)
    plan = next(fitting, one_by_one(plans[0]))
    return tighten(plan, request.costs, _limits(plans[0], limit, split=True), searched=True)


def _best(request: Request) -> Plan:
    """Return the plan that ends first of all schedules within the limit; zb-auto fits any."""
    limit = inf if request.memory_limit is None else request.memory_limit
    plans: list[tuple[float, int, Plan]] = []
    for name, schedule in SCHEDULES.items():
        if name == "zb-2p":
            continue  # its limit counts less than it holds: zb-auto takes the limit as it is
        costs = request.costs.per_chunk(schedule.chunks or 2)
        plan = _from_block(replace(request, schedule=name, costs=costs, chunks=None), schedule)
        if max(in_flight(plan)) <= limit:
            plans.append((earliest(plan, costs).end, len(plans), plan))
    if request.memory_limit is not None:
        plan = _within(request, request.memory_limit)
        plans.append((earliest(plan, request.costs).end, len(plans), plan))
    return min(plans)[2]


def _from_file(request: Request) -> Plan:
    """Load a plan and check it against what is wanted.

    Raises:
        ValueError: if the file is no plan, or one of another pipeline.
    """
    assert request.file is not None
    try:
        plan = Plan.from_text(request.file.read_text())
    except OSError as error:
        raise ValueError(f"cannot read the plan file {request.file}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{request.file}: {error}") from error
    wanted = {
        "ranks": (plan.ranks, request.ranks),
        "microbatches": (plan.microbatches, request.microbatches),
        "barriers": (plan.barriers, VOCABULARY_BARRIERS[request.vocabulary]),
        "synchronous collectives": (plan.synchronous, request.vocabulary == "interlaced"),
    }
    for what, (found, expected) in wanted.items():
        if found != expected:
            raise ValueError(
                f"{request.file} is a plan with {what} = {found}, not {expected}: "
                "ask for what the file holds, or give another file"
            )
    check(plan)
    return plan


def _check_limit(request: Request, plan: Plan) -> None:
    held, limit = max(in_flight(plan, kept_share(request.schedule))), request.memory_limit
    if limit is not None and held > limit + 1e-9:
        raise ValueError(
            f"{request.schedule} holds up to {held:g} microbatches a rank, more than the memory "
            f"limit of {limit:g}: raise it to that, or take 'auto', which looks for one that fits"
        )
