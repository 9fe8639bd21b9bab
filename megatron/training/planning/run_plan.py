"""From a configuration to the plan of a training iteration, which is the same on every rank.

The schedule decides the number of stages. The number of stages decides how many layers each stage
has. The layers decide the costs of the passes, and the costs decide the order of the passes. So no
other rank is needed, and an impossible plan is refused before the ranks meet.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import Final

import torch

from megatron.config.recompute import EVERY_LAYER
from megatron.config.run_config import Alternative, ParallelConfig, RunConfig
from megatron.model.distribution import check_no_rank_is_empty, distribute
from megatron.schedules.catalogue import TRAITS, compared_schedules
from megatron.schedules.costs import Costs
from megatron.schedules.counted import counted
from megatron.schedules.held import in_flight
from megatron.schedules.make_plan import as_compared, one_microbatch_of, plan_for, stages_of
from megatron.schedules.plan import Plan, plan_of_one
from megatron.schedules.request import Request
from megatron.schedules.search.watch import Watch
from megatron.simulator.costs.cost_file import load_costs
from megatron.simulator.costs.gpus import Gpu
from megatron.simulator.costs.measured_costs import measured_costs
from megatron.simulator.costs.stage_costs import StageCosts, even_layers
from megatron.training.planning.alternatives import Compared
from megatron.training.planning.candidate import Candidate
from megatron.training.planning.planned_run import RunPlan
from megatron.training.planning.race import chosen
from megatron.training.planning.run_costs import planned_costs, stage_costs

COMPARISON_SECONDS: Final = 20.0
"""Time to compare schedules on a GPU, at a start or in a dry run without ``--search-seconds``."""


def described(asked: str, run_plan: RunPlan) -> str:
    """Return the asked schedule in words; if it compares others (``auto``), with its choice."""
    if not TRAITS[asked].compares:
        return asked
    held = counted(max(in_flight(run_plan.plan)), "microbatch in flight")
    return f"{run_plan.schedule} (taken by {asked}; up to {held})"


def make_run_plan(
    config: RunConfig,
    costs: Costs | None = None,
    watch: Watch | None = None,
    seconds: float | None = None,
) -> RunPlan:
    """Return the plan of a training iteration.

    Args:
        config: the run.
        costs: costs by rank and chunk, measured on the stages of the plan of ``config``. The new
            plan leaves all layers on their ranks. ``None``: costs are counted, or read from the
            file of ``--measured-costs``.
        watch: ends the search when its time is up, and shows how far it is.
        seconds: time to compare schedules on a GPU, if ``watch`` has no limit.

    Raises:
        ValueError: the layers cannot be spread over the stages, the schedule cannot be made, or
            no schedule fits into the memory limit.
    """
    found = all_compared(config, costs, watch, seconds)
    first = found.choose(seconds) if compares(config) else found.candidates[0]
    return first.run_plan


def compares(config: RunConfig) -> bool:
    """Whether a run leaves its schedule, or a dimension of ``config/choices.py``, to its plan."""
    return bool(config.alternatives) or TRAITS[config.parallel.pipeline_schedule].compares


def depends_on_time(config: RunConfig) -> bool:
    """Whether the plan of a start depends on how fast the machine searches.

    That is so if the search has a time limit, or if plans are compared by their seconds on a GPU:
    the comparison is limited to ``COMPARISON_SECONDS``.
    """
    limited = config.parallel.search_seconds is not None
    return limited or (compares(config) and _gpu(config, None) is not None)


def asked(
    config: RunConfig, costs: Costs | None = None, watch: Watch | None = None
) -> list[Candidate]:
    """Return the candidates of ``all_compared``, with no other limit of time than the watch's."""
    return all_compared(config, costs, watch).candidates


def all_compared(
    config: RunConfig,
    costs: Costs | None = None,
    watch: Watch | None = None,
    seconds: float | None = None,
) -> Compared:
    """Return the candidates of a run, bounded if a run on a GPU has many alternatives.

    The arguments are as for ``make_run_plan``. Alternatives that change more than the treatment of
    the vocabulary are looked at for half of the time, those with the fewest changes first, or for
    all of it if none can fit. Without a known GPU they are left out: FLOPs cannot compare them.

    Raises:
        ValueError: the layers cannot be spread over the stages.
    """
    watch = Watch() if watch is None else watch
    several = _comparable(config, costs)
    runs = [config.taking(own) for own in several] or [config]
    found = Compared(runs, lambda run: _asked(run, costs, watch), watch)
    found.look(sum(not own.changes for own in several), seconds)
    if compares(config):
        watch.expect(len(found.candidates))
    return found


def _comparable(config: RunConfig, costs: Costs | None) -> list[Alternative]:
    """Return the alternatives that can be compared: by FLOPs, only those without changes."""
    known = _gpu(config, costs) is not None
    return [own for own in config.alternatives if known or not own.changes]


def _asked(config: RunConfig, costs: Costs | None, watch: Watch) -> list[Candidate]:
    """Return the candidates of a run that leaves at most its schedule to its plan.

    If the run is one of several alternatives, and its plan exceeds the limit of microbatches in
    flight, another alternative is taken, as ``auto`` takes another schedule.
    """
    name, limit = config.parallel.pipeline_schedule, inf
    if TRAITS[name].compares:
        return candidates(config, costs, watch)
    request, layers = _prepare(config, name, costs)
    if config.taken and config.parallel.memory_limit is not None:
        request, limit = as_compared(request), config.parallel.memory_limit
    return [Candidate(config, request, layers, limit, watch, _gpu(config, costs))]


def candidates(
    config: RunConfig,
    costs: Costs | None = None,
    watch: Watch | None = None,
    names: Sequence[str] | None = None,
) -> list[Candidate]:
    """Return all schedules that the run could take, each with its own stages, layers and costs.

    A schedule is left out if the layers cannot be spread over its stages. With ``costs``, a
    schedule is also left out if its stages are not where the costs were measured.

    The schedule that ``config`` names does not matter, but its treatment of the vocabulary must be
    decided. ``costs`` are as for ``make_run_plan`` with the schedule ``auto``. ``names`` are the
    schedules to look at; ``None``: all.

    Raises:
        ValueError: all schedules are left out; the message has the reason of the first.
    """
    watch = Watch() if watch is None else watch
    measured = None if costs is None else chosen(candidates(config)).run_plan.plan
    limit = inf if config.parallel.memory_limit is None else config.parallel.memory_limit
    gpu = _gpu(config, costs)
    found, faults = [], []
    for name in names or compared_schedules(config.parallel.memory_limit):
        try:
            request, layers = _prepare(config, name, costs)
        except ValueError as error:
            faults.append(f"{name}: {error}")
            continue
        if measured is None or _runs_on(request, measured):
            found.append(Candidate(config, request, layers, limit, watch, gpu))
    if not found:
        asked = config.parallel.pipeline_schedule
        raise ValueError(
            f"--pipeline-schedule {asked}: no schedule can train this model; {faults[0]}"
        )
    return found


def schedules_with_stages(config: RunConfig) -> list[str]:
    """Return the schedules that ``candidates`` looks at, without those that have too many stages.

    Nothing is counted. ``candidates`` may leave out more schedules.
    """
    found = []
    for name in compared_schedules(config.parallel.memory_limit):
        with suppress(ValueError):
            _check_stages(config, _request(config.parallel, config.train.num_microbatches, name))
            found.append(name)
    return found


def _gpu(config: RunConfig, costs: Costs | None) -> Gpu | None:
    """Return the GPU by whose seconds plans are compared.

    ``None``: costs are measured, or the run is in fp32, for which no GPU's rates are known.
    """
    measured = costs is not None or config.train.dtype == torch.float32
    return None if measured else config.parallel.gpu


def _runs_on(request: Request, measured: Plan) -> bool:
    """Whether a schedule has the stages of ``measured``, and only passes that were measured."""
    has_weights = measured.split_backward or not request.traits.split
    return has_weights and stages_of(request) == measured.stages


def _prepare(config: RunConfig, name: str, costs: Costs | None) -> tuple[Request, tuple[int, ...]]:
    """Return the request for the schedule ``name``, and the layers of its stages.

    Raises:
        ValueError: the layers cannot be spread over the stages, or a rank would have no parameters.
    """
    request = _request(config.parallel, config.train.num_microbatches, name)
    if request.file is not None:
        _check_file(request, config)
    one = _one_microbatch(config, request)
    whole = _uncut(one)
    spread, measured = config.parallel.layers, _measured(config, request, whole)
    if spread.needs_times:
        known = measured or stage_costs(config, whole, _even(config, one))
        number, further = config.model.num_layers, config.model.mtp_num_layers
        layers = (
            known.alike(number, further)
            if spread.kind == "cost"
            else known.balanced(number, spread.last)
        )
    else:
        layers = distribute(spread, config.model.num_layers, len(one.stages))
    if not one.treatment.is_sharded:
        check_no_rank_is_empty(spread, one.stages, layers)
    if costs is None:
        costs = planned_costs(config, one, layers) if measured is None else measured.costs(layers)
    return replace(request, costs=costs), layers


def _even(config: RunConfig, plan: Plan) -> tuple[int, ...]:
    return even_layers(config.model.num_layers, len(plan.stages))


def _one_microbatch(config: RunConfig, request: Request) -> Plan:
    """Return a schedule's plan of one microbatch, without a search.

    Raises:
        ValueError: the layers cannot be spread over the stages.
    """
    _check_stages(config, request)  # first, because a plan of many stages takes long to make
    one = one_microbatch_of(request) if request.file is None else plan_of_one(plan_for(request))
    return replace(one, looks_ahead=config.model.mtp_num_layers > 0)


def _check_stages(config: RunConfig, request: Request) -> None:
    """Refuse a number of stages over which the layers cannot be spread, if no plan decides it.

    Raises:
        ValueError: the layers cannot be spread.
    """
    if not config.parallel.layers.needs_times and request.file is None:
        chunks = request.chunks or request.traits.chunks
        distribute(config.parallel.layers, config.model.num_layers, request.ranks * chunks)


def _uncut(plan: Plan) -> Plan:
    """Return a plan of one microbatch without slices, its passes in the order of the first ones.

    Layers are spread over stages, and costs are measured, by whole microbatches.
    """
    rows = tuple(tuple(item for item in row if item.slice == 0) for row in plan.rows)
    return replace(plan, rows=rows, slices=1)


def _check_file(request: Request, config: RunConfig) -> None:
    """Read the plan file, so that an error in the file is told with the file's flag.

    Raises:
        ValueError: the file holds no plan, a plan that cannot be run, or a plan for another run.
    """
    try:
        plan = plan_for(request)
    except ValueError as error:
        raise ValueError(f"--schedule-file: {error}") from error
    if plan.recomputes and not config.train.recomputation.group:
        raise ValueError(
            f"--schedule-file: {request.file} has passes R, which compute layers again, and no "
            f"layer is to be: add {EVERY_LAYER}, or give a plan without them"
        )
    if plan.offloaded and config.parallel.offloaded is None:
        raise ValueError(
            f"--schedule-file: {request.file} says 'offloaded {plan.offloaded}', and no flag moves "
            f"activations to the host: add --cpu-offload --offload-chunk-num {plan.offloaded}, or "
            "take the line out"
        )


def _request(parallel: ParallelConfig, microbatches: int, name: str) -> Request:
    """Return the request for a schedule, whether the run names it or ``auto`` compares it."""
    traits = TRAITS[name]
    request = Request(
        name,
        parallel.vocab_parallel,
        parallel.pipeline_size,
        microbatches,
        chunks=parallel.virtual_stages if traits.takes_chunks else None,
        memory_limit=parallel.memory_limit,
        recompute_ahead=parallel.recompute_ahead,
        file=parallel.schedule_file,
        joined=parallel.experts.overlap,
        split_backward=parallel.experts.delays_weights and "split_backward" in traits.options,
        slices=parallel.num_seq_splits,
    )
    return as_compared(request) if TRAITS[parallel.pipeline_schedule].compares else request


def _measured(config: RunConfig, request: Request, one: Plan) -> StageCosts | None:
    """Return the costs from the file of measured costs, if the run has one.

    Raises:
        ValueError: the file is missing, or has the costs of other stages or passes.
    """
    file = config.parallel.measured_costs
    if file is None:
        return None
    try:
        found = measured_costs(load_costs(file), stage_costs(config, one, _even(config, one)))
        splits = request.traits.split or request.split_backward
        if splits and "W" not in found.layer:
            raise ValueError(
                f"no W passes, which {request.schedule} runs: measure with a schedule that splits "
                "the backward, or take one that does not"
            )
        if request.recompute_ahead is not None and "R" not in found.layer:
            raise ValueError(
                "no R passes, which --recompute-ahead runs: measure with --recompute-ahead too, or "
                "leave it out"
            )
    except ValueError as error:
        raise ValueError(f"--measured-costs {file}: {error}") from error
    return found
