"""From a configuration to the request for a schedule's plan, and to the layers of its stages.

A request needs costs, costs need the layers of each stage, and layers are spread over the stages of
a plan of one microbatch, which needs neither.
"""

from dataclasses import replace

from megatron.model.distribution import check_no_rank_is_empty, distribute
from megatron.planning.memory_limit import limited
from megatron.planning.run_costs import layers_alone, planned_costs, stage_costs
from megatron.run.parallel_config import ParallelConfig
from megatron.run.recompute import EVERY_LAYER
from megatron.run.run_config import RunConfig
from megatron.schedules.catalogue import TRAITS
from megatron.schedules.costs import Costs
from megatron.schedules.make_plan import as_compared, one_microbatch_of, plan_for, stages_of
from megatron.schedules.plan import Plan, plan_of_one
from megatron.schedules.request import Request
from megatron.schedules.settings import PlanSettings
from megatron.simulator.costs.cost_file import load_costs
from megatron.simulator.costs.measured_costs import measured_costs
from megatron.simulator.costs.planned_waits import with_planned_waits
from megatron.simulator.costs.stage_costs import StageCosts, even_layers


def runs_on(request: Request, measured: Plan) -> bool:
    """Whether a schedule has the stages of ``measured``, and only passes that were measured."""
    has_weights = measured.split_backward or not request.traits.split
    return has_weights and stages_of(request) == measured.stages


def prepared(config: RunConfig, name: str, costs: Costs | None) -> tuple[Request, tuple[int, ...]]:
    """Return the request for the schedule ``name``, and the layers of its stages.

    Raises:
        ValueError: the layers cannot be spread over the stages, or a rank would have no parameters.
    """
    request = request_of(config.parallel, config.train.num_microbatches, name)
    if request.file is not None:
        _check_file(request, config)
    one = _one_microbatch(config, request)
    whole = _uncut(one)
    spread, measured = config.parallel.layers, _measured(config, request, whole)
    if spread.needs_times:
        number, further = config.model.num_layers, config.model.further.mtp_num_layers
        if spread.kind == "cost":
            layers = (measured or layers_alone(config, whole)).alike(number, further)
        else:
            known = measured or stage_costs(config, whole, _even(config, one))
            layers = known.balanced(number, spread.last)
    else:
        layers = distribute(spread, config.model.num_layers, len(one.stages))
    if not one.treatment.is_sharded:
        check_no_rank_is_empty(spread, one.stages, layers, one.ahead_stage)
    if costs is None:
        costs = _costs(config, one, layers, measured)
    return limited(config, replace(request, costs=costs), layers), layers


def _costs(
    config: RunConfig, one: Plan, layers: tuple[int, ...], measured: StageCosts | None
) -> Costs:
    """Return the costs of a plan of one microbatch: counted, or measured with counted waits."""
    if measured is None:
        return planned_costs(config, one, layers)
    costs = measured.costs(layers)
    if config.parallel.gpu is None or not config.parallel.pairs.joins:
        return costs
    return with_planned_waits(costs, planned_costs(config, one, layers))


def _even(config: RunConfig, plan: Plan) -> tuple[int, ...]:
    return even_layers(config.model.num_layers, len(plan.stages))


def _one_microbatch(config: RunConfig, request: Request) -> Plan:
    """Return a schedule's plan of one microbatch, without a search.

    Raises:
        ValueError: the layers cannot be spread over the stages.
    """
    check_stages(config, request)  # first, because a plan of many stages takes long to make
    one = one_microbatch_of(request) if request.file is None else plan_of_one(plan_for(request))
    return replace(one, ahead_stage=config.ahead_stage(len(one.stages)))


def check_stages(config: RunConfig, request: Request) -> None:
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
    if plan.offloaded and not config.parallel.offload.cpu_offload:
        raise ValueError(
            f"--schedule-file: {request.file} says 'offloaded {plan.offloaded}', and no flag moves "
            f"activations to the host: add --cpu-offload --offload-chunk-num {plan.offloaded}, or "
            "take the line out"
        )


def request_of(parallel: ParallelConfig, microbatches: int, name: str) -> Request:
    """Return the request for a schedule, whether the run names it or ``auto`` compares it."""
    traits = TRAITS[name]
    request = Request(
        name,
        parallel.vocab_parallel,
        parallel.pipeline.size,
        microbatches,
        chunks=parallel.schedule.chunks if traits.takes_chunks else None,
        memory_limit=_limit(parallel.planning, microbatches),
        recompute_ahead=parallel.recompute_ahead,
        file=parallel.planning.schedule_file,
        joined=parallel.pairs.joins,
        joins_all=parallel.pairs.tp_comm_overlap,
        split_backward=parallel.pairs.delay_wgrad_compute and "split_backward" in traits.options,
        slices=parallel.slices.num_seq_splits,
        options=parallel.block_options.taken_by(traits),
    )
    return as_compared(request) if TRAITS[parallel.pipeline_schedule].compares else request


def _limit(planning: PlanSettings, microbatches: int) -> float | None:
    """Return the limit of a request: with a limit by memory, at first all microbatches.

    How many microbatches memory has room for is counted when the layers are known
    (``memory_limit.limited``).
    """
    return float(microbatches) if planning.is_limited_by_memory else planning.memory_limit


def _measured(config: RunConfig, request: Request, one: Plan) -> StageCosts | None:
    """Return the costs from the file of measured costs, if the run has one.

    Raises:
        ValueError: the file is missing, or has the costs of other stages or passes.
    """
    file = config.parallel.planning.measured_costs
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
