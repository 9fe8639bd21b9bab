"""From a configuration to the plan of a training iteration: pure Python, the same on every rank.

A schedule decides how many stages there are; their number how many layers each has; the layers what
the passes of each cost; the costs the order of the passes. All of it is known before any rank
starts, and so is whatever cannot be.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Final

from megatron.config.run_config import ParallelConfig, RunConfig
from megatron.model.distribution import (
    LayerDistribution,
    check_no_rank_is_empty,
    distribute,
)
from megatron.schedules.catalogue import TRAITS, compared_schedules
from megatron.schedules.costs import Costs
from megatron.schedules.held import in_flight
from megatron.schedules.lower import lower
from megatron.schedules.make_plan import least_time_of, plan_for, stages_of
from megatron.schedules.plan import Plan
from megatron.schedules.request import Request
from megatron.schedules.search.fastest import fastest
from megatron.schedules.treatments import TREATMENTS
from megatron.simulator.costs.cost_file import load_costs
from megatron.simulator.costs.measured_costs import measured_costs
from megatron.simulator.costs.shape import Shape
from megatron.simulator.costs.stage_costs import StageCosts, notional_costs
from megatron.simulator.simulate import Timeline, simulate
from megatron.training.planning.model_shape import shape_of

NEAR: Final = 0.01
"""Share of the time by which a further schedule must be able to be faster for ``auto`` to plan it.

Searches take seconds: with vocab-2 the first that is planned is mostly zb-v, which rests so little
that they are spared."""


@dataclass(frozen=True)
class RunPlan:
    """What the ranks run, and what was assumed to find it.

    Attributes:
        plan: the checked plan of a training iteration.
        layers: transformer layers of every stage, in the order in which the data flows.
        costs: durations by which passes and communication were placed.
    """

    plan: Plan
    layers: tuple[int, ...]
    costs: Costs


@dataclass(frozen=True)
class Candidate:
    """A schedule that ``auto`` compares; it is planned when it is asked for.

    Attributes:
        request: for its plan.
        layers: of every stage.
        limit: the most microbatches that a rank may hold.
    """

    request: Request
    layers: tuple[int, ...]
    limit: float

    @property
    def schedule(self) -> str:
        """Its name."""
        return self.request.schedule

    @cached_property
    def run_plan(self) -> RunPlan:
        """What it would run."""
        return RunPlan(plan_for(self.request), self.layers, self.request.costs)

    @cached_property
    def timeline(self) -> Timeline:
        """What an iteration would be, in the unit of the costs."""
        costs = self.request.costs
        return simulate(lower(self.run_plan.plan, costs), costs)

    @property
    def time(self) -> float:
        """Simulated time of an iteration, in the unit of the costs."""
        return self.timeline.end

    @cached_property
    def least_time(self) -> float:
        """What ``time`` cannot be below, known without the plan."""
        return least_time_of(self.request)

    @cached_property
    def in_flight(self) -> float:
        """The most microbatches that a rank holds."""
        return max(in_flight(self.run_plan.plan))

    @property
    def fits(self) -> bool:
        """Whether that is within the limit."""
        return self.in_flight <= self.limit


def make_run_plan(config: RunConfig, costs: Costs | None = None) -> RunPlan:
    """Return the plan of a training iteration.

    Args:
        config: the run.
        costs: measured on the stages that the plan of ``config`` has, by rank and chunk; layers
            stay where they are. Without, passes are placed by their FLOPs.

    Raises:
        ValueError: if the layers cannot be spread over the stages, the schedule cannot be made, or
            no schedule fits into the memory limit.
    """
    if TRAITS[config.parallel.pipeline_schedule].compares:
        return chosen(candidates(config, costs)).run_plan
    request, layers = _prepare(config, config.parallel.pipeline_schedule, costs)
    return RunPlan(plan_for(request), layers, request.costs)


def candidates(config: RunConfig, costs: Costs | None = None) -> list[Candidate]:
    """Return all schedules that the run could take, each with its own stages, layers and costs.

    Those whose stages the layers cannot be spread over are left out, and with ``costs`` those whose
    stages are not where they were measured.

    Args:
        config: the run; its own schedule does not matter.
        costs: as for ``make_run_plan`` with the schedule ``auto``.

    Raises:
        ValueError: if there is none, saying why the first was none.
    """
    measured = None if costs is None else chosen(candidates(config)).run_plan.plan
    limit = inf if config.parallel.memory_limit is None else config.parallel.memory_limit
    found, faults = [], []
    for name in compared_schedules(config.parallel.memory_limit):
        try:
            request, layers = _prepare(config, name, costs)
        except ValueError as error:
            faults.append(f"{name}: {error}")
            continue
        if measured is None or _runs_on(request, measured):
            found.append(Candidate(request, layers, limit))
    if not found:
        raise ValueError(f"no schedule can train this model; {faults[0]}")
    return found


def ranking(compared: Sequence[Candidate]) -> list[Candidate]:
    """Return all schedules, planned: what ``auto`` takes, the others that fit, the rest; by time.

    Raises:
        ValueError: if none is within the memory limit.
    """
    first = chosen(compared)
    others = [candidate for candidate in compared if candidate is not first]
    return [first, *sorted(others, key=lambda candidate: (not candidate.fits, candidate.time))]


def chosen(compared: Sequence[Candidate]) -> Candidate:
    """Return what ``auto`` takes: the fastest within the memory limit, or one ``NEAR`` to it.

    Raises:
        ValueError: if none is within the limit.
    """
    best = fastest(compared, lambda candidate: candidate.fits, NEAR)
    if best is not None:
        return best
    least = min(compared, key=lambda candidate: candidate.in_flight)
    raise ValueError(
        f"--zero-bubble-max-pending-backward {least.limit:g} is too few for every schedule: "
        f"the least is {least.in_flight:g}, with {least.schedule}"
    )


def _runs_on(request: Request, measured: Plan) -> bool:
    """Whether a schedule has the stages of ``measured``, and only passes that were measured."""
    has_weights = measured.split_backward or not request.traits.split
    return has_weights and stages_of(request) == measured.stages


def _prepare(config: RunConfig, name: str, costs: Costs | None) -> tuple[Request, tuple[int, ...]]:
    """Return what to ask for to have the schedule ``name``, and the layers of its stages.

    Raises:
        ValueError: if the layers cannot be spread over them, or would leave a rank without
            parameters.
    """
    request = _request(config.parallel, config.train.num_microbatches, name)
    shape = shape_of(config.model, config.train.micro_batch_size)
    stage_costs = _stage_costs(shape, request, config.parallel.measured_costs)
    layers = _stage_layers(config.parallel.layers, config.model.num_layers, stage_costs)
    if not stage_costs.treatment.is_sharded:
        check_no_rank_is_empty(config.parallel.layers, stage_costs.stages, layers)
    costs = stage_costs.costs(layers) if costs is None else costs
    return replace(request, costs=costs), layers


def _request(parallel: ParallelConfig, microbatches: int, name: str) -> Request:
    """Return the request for a schedule; for ``auto``, whose limit is its own, without a limit."""
    traits = TRAITS[name]
    compared = TRAITS[parallel.pipeline_schedule].compares and not traits.needs_memory_limit
    return Request(
        name,
        parallel.vocab_parallel,
        parallel.pipeline_size,
        microbatches,
        chunks=parallel.virtual_stages if traits.takes_chunks else None,
        memory_limit=None if compared else parallel.memory_limit,
        file=parallel.schedule_file,
    )


def _stage_costs(shape: Shape, request: Request, file: Path | None) -> StageCosts:
    """Return what the stages of a schedule cost, by FLOPs or as a file says.

    Raises:
        ValueError: if there is no such file, or one of other stages or passes.
    """
    assumed = notional_costs(shape, stages_of(request), TREATMENTS[request.vocabulary])
    if file is None:
        return assumed
    try:
        found = measured_costs(load_costs(file), assumed)
        if request.traits.split and "W" not in found.layer:
            raise ValueError(
                f"no W passes, which {request.schedule} runs: measure with a schedule that splits "
                "the backward, or take one that does not"
            )
    except ValueError as error:
        raise ValueError(f"--measured-costs {file}: {error}") from error
    return found


def _stage_layers(
    distribution: LayerDistribution, num_layers: int, stage_costs: StageCosts
) -> tuple[int, ...]:
    """Return the transformer layers of every stage.

    Raises:
        ValueError: if they cannot be spread as the flags say.
    """
    if distribution.kind == "redis":
        return stage_costs.balanced(num_layers, distribution.last)
    return distribute(distribution, num_layers, len(stage_costs.stages))
