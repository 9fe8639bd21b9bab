"""From a configuration to the plan of a training iteration: pure Python, the same on every rank.

The schedule decides the number of stages. The number of stages decides how many layers each stage
has. The layers decide the costs of the passes, and the costs decide their order. All of it is known
before any rank starts; an impossible plan is refused then too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Final

from megatron.config.recompute_flags import EVERY_LAYER
from megatron.config.run_config import ParallelConfig, RunConfig
from megatron.layers.recompute import Recomputation
from megatron.model.distribution import check_no_rank_is_empty, distribute
from megatron.schedules.catalogue import TRAITS, compared_schedules
from megatron.schedules.costs import Costs
from megatron.schedules.counted import counted
from megatron.schedules.held import in_flight
from megatron.schedules.lower import lower
from megatron.schedules.make_plan import (
    as_compared,
    least_time_of,
    one_microbatch_of,
    plan_for,
    stages_of,
)
from megatron.schedules.plan import Plan, plan_of_one
from megatron.schedules.request import Request
from megatron.schedules.search.fastest import fastest
from megatron.schedules.search.watch import Watch
from megatron.simulator.costs.cost_file import load_costs
from megatron.simulator.costs.measured_costs import measured_costs
from megatron.simulator.costs.stage_costs import StageCosts, even_layers
from megatron.simulator.simulate import Timeline, simulate
from megatron.training.planning.run_costs import planned_costs, stage_costs

NEAR: Final = 0.01
"""Share of the time that a further schedule must be able to save for ``auto`` to plan it.

Searches take seconds. With vocab-2 ``auto`` mostly plans zb-v first, which idles so little that no
search is needed."""


@dataclass(frozen=True)
class RunPlan:
    """The plan that the ranks run, and the assumptions behind it.

    Attributes:
        plan: the checked plan of a training iteration.
        layers: transformer layers of every stage, in the order in which the data flows.
        costs: durations by which passes and communication were placed.
        schedule: the schedule that it is of; of those that ``auto`` compares the one that it takes.
    """

    plan: Plan
    layers: tuple[int, ...]
    costs: Costs
    schedule: str


@dataclass(frozen=True)
class Candidate:
    """A schedule that ``auto`` compares; its plan is made when it is first needed.

    Attributes:
        request: request for its plan.
        layers: transformer layers of every stage.
        limit: the most microbatches that a rank may hold.
        looks_ahead: whether the last stage reads embeddings too.
        watch: watches over the search for the plan.
    """

    request: Request
    layers: tuple[int, ...]
    limit: float
    looks_ahead: bool = False
    watch: Watch = field(default_factory=Watch, compare=False)

    @property
    def schedule(self) -> str:
        """Its name."""
        return self.request.schedule

    @property
    def is_planned(self) -> bool:
        """Whether its plan is made."""
        return "run_plan" in vars(self)

    @cached_property
    def run_plan(self) -> RunPlan:
        """The plan with its layers and costs."""
        self.watch.next_plan()
        plan = replace(plan_for(self.request, self.watch), looks_ahead=self.looks_ahead)
        return RunPlan(plan, self.layers, self.request.costs, self.schedule)

    @cached_property
    def timeline(self) -> Timeline:
        """The simulated timeline of an iteration, in the unit of the costs."""
        costs = self.request.costs
        return simulate(lower(self.run_plan.plan, costs), costs)

    @property
    def time(self) -> float:
        """Simulated time of an iteration, in the unit of the costs."""
        return self.timeline.end

    @cached_property
    def least_time(self) -> float:
        """Lower bound of ``time``, known without the plan."""
        return least_time_of(self.request)

    @cached_property
    def in_flight(self) -> float:
        """The most microbatches that a rank holds."""
        return max(in_flight(self.run_plan.plan))

    @property
    def fits(self) -> bool:
        """Whether ``in_flight`` is within the limit."""
        return self.in_flight <= self.limit

    def tell(self) -> None:
        """Show the watch's reader what the plan is like; it is made if need be."""
        least = self.time / self.least_time
        held = counted(self.in_flight, "microbatch in flight")
        fault = "" if self.fits else ": too many"
        self.watch.planned(
            self.schedule,
            f"time {self.time:.6g} FLOPs of a rank, {least:.3f} times the least that it can take, "
            f"{held}{fault}",
        )


def described(asked: str, run_plan: RunPlan) -> str:
    """Return a schedule and, if it is one that compares others, which of them it takes.

    Args:
        asked: the schedule that the flags name.
        run_plan: the plan that was made.
    """
    if not TRAITS[asked].compares:
        return asked
    held = counted(max(in_flight(run_plan.plan)), "microbatch in flight")
    return f"{run_plan.schedule} (taken by {asked}; up to {held})"


def make_run_plan(
    config: RunConfig, costs: Costs | None = None, watch: Watch | None = None
) -> RunPlan:
    """Return the plan of a training iteration.

    Args:
        config: the run.
        costs: costs by rank and chunk, measured on the stages of the plan of ``config``; layers
            stay where they are. Without measured costs, passes are placed by their FLOPs.
        watch: ends the search when its time is up, and shows how far it is.

    Raises:
        ValueError: the layers cannot be spread over the stages, the schedule cannot be made, or
            no schedule fits into the memory limit.
    """
    compared = asked(config, costs, watch)
    compares = TRAITS[config.parallel.pipeline_schedule].compares
    return (chosen(compared) if compares else compared[0]).run_plan


def asked(
    config: RunConfig, costs: Costs | None = None, watch: Watch | None = None
) -> list[Candidate]:
    """Return the one schedule that a run asks for, or all that it lets ``auto`` compare.

    Args: as those of ``make_run_plan``.

    Raises:
        ValueError: the layers cannot be spread over the stages.
    """
    name = config.parallel.pipeline_schedule
    watch = Watch() if watch is None else watch
    if TRAITS[name].compares:
        found = candidates(config, costs, watch)
        watch.expect(len(found))
        return found
    request, layers = _prepare(config, name, costs)
    return [Candidate(request, layers, inf, config.model.mtp_num_layers > 0, watch)]


def candidates(
    config: RunConfig, costs: Costs | None = None, watch: Watch | None = None
) -> list[Candidate]:
    """Return all schedules that the run could take, each with its own stages, layers and costs.

    A schedule is left out if the layers cannot be spread over its stages. With ``costs``, a
    schedule is also left out if its stages are not where the costs were measured.

    Args:
        config: the run; its own schedule does not matter.
        costs: as for ``make_run_plan`` with the schedule ``auto``.
        watch: watches over the search for their plans.

    Raises:
        ValueError: there is no such schedule; the message says why the first one was left out.
    """
    watch = Watch() if watch is None else watch
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
            found.append(Candidate(request, layers, limit, config.model.mtp_num_layers > 0, watch))
    if not found:
        asked = config.parallel.pipeline_schedule
        raise ValueError(
            f"--pipeline-schedule {asked}: no schedule can train this model; {faults[0]}"
        )
    return found


def ranking(compared: Sequence[Candidate]) -> list[Candidate]:
    """Return all schedules with their plans, in the order of preference.

    First comes the schedule that ``auto`` takes, then the others that fit, then those that do not
    fit; the others and the rest are each sorted by time. Those that are not planned when the time
    of the search is up are left out.

    Raises:
        ValueError: no schedule is within the memory limit.
    """
    first = chosen(compared)
    others = [candidate for candidate in compared if candidate is not first]
    for candidate in others:
        if not candidate.is_planned and not candidate.watch.is_over:
            candidate.tell()
    planned = [candidate for candidate in others if candidate.is_planned]
    return [first, *sorted(planned, key=lambda candidate: (not candidate.fits, candidate.time))]


def chosen(compared: Sequence[Candidate]) -> Candidate:
    """Return the schedule that ``auto`` takes.

    It is within the memory limit, and is the fastest such schedule or within ``NEAR`` of it.

    Raises:
        ValueError: no schedule is within the limit.
    """
    best = fastest(
        compared,
        lambda candidate: candidate.fits,
        NEAR,
        is_over=lambda: any(candidate.watch.is_over for candidate in compared),
        made=Candidate.tell,
    )
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
    """Return the request for the schedule ``name``, and the layers of its stages.

    Raises:
        ValueError: the layers cannot be spread over the stages, or a rank would have no parameters.
    """
    request = _request(config.parallel, config.train.num_microbatches, name)
    if request.file is not None:
        _check_file(request, config.train.recomputation)
    one = _one_microbatch(config, request)
    spread, measured = config.parallel.layers, _measured(config, request, one)
    if spread.kind == "redis":
        known = measured or stage_costs(config, one, _even(config, one))
        layers = known.balanced(config.model.num_layers, spread.last)
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
    """Return a plan of one microbatch of a schedule; none is searched.

    Raises:
        ValueError: the layers cannot be spread over the stages.
    """
    if config.parallel.layers.kind != "redis" and request.file is None:
        # A plan of many stages takes long, so layers that do not fit them are told before.
        chunks = request.chunks or request.traits.chunks
        distribute(config.parallel.layers, config.model.num_layers, request.ranks * chunks)
    one = one_microbatch_of(request) if request.file is None else plan_of_one(plan_for(request))
    return replace(one, looks_ahead=config.model.mtp_num_layers > 0)


def _check_file(request: Request, recomputation: Recomputation) -> None:
    """Read the plan file, so that what is wrong with it is told with its flag.

    Raises:
        ValueError: it holds no plan, one that cannot be run, or another one than is wanted.
    """
    try:
        plan = plan_for(request)
    except ValueError as error:
        raise ValueError(f"--schedule-file: {error}") from error
    if plan.recomputes and not recomputation.group:
        raise ValueError(
            f"--schedule-file: {request.file} has passes R, which compute layers again, and no "
            f"layer is to be: add {EVERY_LAYER}, or give a plan without them"
        )


def _request(parallel: ParallelConfig, microbatches: int, name: str) -> Request:
    """Return the request for a schedule, which may be one of those that ``auto`` compares."""
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
    )
    return as_compared(request) if TRAITS[parallel.pipeline_schedule].compares else request


def _measured(config: RunConfig, request: Request, one: Plan) -> StageCosts | None:
    """Return the costs from the file of measured costs, if the run has one.

    Raises:
        ValueError: there is no such file, or it is about other stages or passes.
    """
    file = config.parallel.measured_costs
    if file is None:
        return None
    try:
        found = measured_costs(load_costs(file), stage_costs(config, one, _even(config, one)))
        if request.traits.split and "W" not in found.layer:
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
