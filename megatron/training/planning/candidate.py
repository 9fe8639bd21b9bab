"""A schedule that a run could take, with a treatment of the vocabulary.

Candidates are compared by the seconds of the GPU that is asked about. Without a GPU, or with one
that nothing is known of, they are compared by FLOPs.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING

from megatron.config.run_config import RunConfig
from megatron.schedules.costs import Costs
from megatron.schedules.counted import counted
from megatron.schedules.held import in_flight
from megatron.schedules.lower import lower
from megatron.schedules.make_plan import least_time_of, one_microbatch_of, plan_for
from megatron.schedules.plan import Plan
from megatron.schedules.request import Request
from megatron.schedules.search.watch import Watch
from megatron.simulator.simulate import Timeline, simulate
from megatron.simulator.units import MEMORY, TIME

if TYPE_CHECKING:
    from megatron.training.planning.estimate import Estimate
    from megatron.training.planning.forecast_run import RunForecast
    from megatron.training.planning.pricing import Pricing


@dataclass(frozen=True)
class RunPlan:
    """The plan that the ranks run, and the assumptions behind it.

    Attributes:
        plan: the checked plan of a training iteration.
        layers: transformer layers of every stage, in the order in which the data flows.
        costs: durations by which passes and communication were placed.
        schedule: the schedule that it is of; of those that ``auto`` compares the one that it takes.
        treatment: of the vocabulary, in the same sense; ``None``: that of the run.
    """

    plan: Plan
    layers: tuple[int, ...]
    costs: Costs
    schedule: str
    treatment: str | None = None


@dataclass(frozen=True)
class Candidate:
    """A schedule that ``auto`` compares; its plan is made when it is first needed.

    Attributes:
        config: the run with its treatment of the vocabulary.
        request: request for its plan.
        layers: transformer layers of every stage.
        limit: the most microbatches that a rank may hold.
        watch: watches over the search for the plan.
        pricing: tells the seconds and bytes of plans on a GPU; ``None``: plans are compared by
            their costs, whatever they take.
    """

    config: RunConfig = field(repr=False, compare=False)
    request: Request
    layers: tuple[int, ...]
    limit: float = inf
    watch: Watch = field(default_factory=Watch, compare=False)
    pricing: "Pricing | None" = field(default=None, compare=False)

    @property
    def schedule(self) -> str:
        """Its name."""
        return self.request.schedule

    @property
    def treatment(self) -> str:
        """Treatment of the vocabulary."""
        return self.config.parallel.vocab_parallel

    @property
    def is_planned(self) -> bool:
        """Whether its plan is made."""
        return "run_plan" in vars(self)

    @cached_property
    def run_plan(self) -> RunPlan:
        """The plan with its layers and costs."""
        self.watch.next_plan()
        return self._of_run(plan_for(self.request, self.watch))

    @cached_property
    def timeline(self) -> Timeline:
        """The simulated timeline of an iteration, in the unit of the costs."""
        costs = self.request.costs
        return simulate(lower(self.run_plan.plan, costs), costs)

    @cached_property
    def forecast(self) -> "RunForecast | None":
        """What the GPU makes of the plan; ``None``: there is no GPU to ask about."""
        return None if self.pricing is None else self.pricing.forecast(self.run_plan)

    @property
    def time(self) -> float:
        """Time of an iteration: in seconds of the GPU, else simulated, in the unit of the costs."""
        found = self.forecast
        return self.timeline.end if found is None else found.outcome.seconds

    @cached_property
    def least_time(self) -> float:
        """Lower bound of ``time``, known without the plan."""
        if self.pricing is None:
            return least_time_of(self.request)
        one = self._of_run(one_microbatch_of(self.request))
        return self.pricing.least_seconds(one, self.request.microbatches)

    @cached_property
    def can_fit(self) -> bool:
        """Whether a plan could fit the GPU, known without the plan."""
        return self.pricing is None or self.pricing.can_fit(self)

    @cached_property
    def in_flight(self) -> float:
        """The most microbatches that a rank holds."""
        return max(in_flight(self.run_plan.plan))

    @property
    def is_within_limit(self) -> bool:
        """Whether ``in_flight`` is within the limit."""
        return self.in_flight <= self.limit

    @property
    def fits(self) -> bool:
        """Whether ``in_flight`` is within the limit, and the plan fits the GPU."""
        found = self.forecast
        return self.is_within_limit and (found is None or found.fits)

    @property
    def peak(self) -> float:
        """Bytes of the fullest rank of the GPU, or the most microbatches that a rank holds."""
        found = self.forecast
        return self.in_flight if found is None else max(found.outcome.peak)

    def estimate(self, watch: Watch) -> "Estimate":
        """Return what a plan of few microbatches says of the run on the GPU.

        Args:
            watch: ends the search for that plan.
        """
        assert self.pricing is not None, "without a GPU candidates are compared by their plans"
        return self.pricing.estimate(self, watch)

    def tell(self) -> None:
        """Show the watch's reader what the plan is like; it is made if need be."""
        found, least = self.forecast, self.time / self.least_time
        time = f"{self.time:.6g} FLOPs of a rank" if found is None else TIME.write(self.time)
        memory = "" if found is None else f", {MEMORY.write(self.peak)}"
        held = counted(self.in_flight, "microbatch in flight")
        fault = "" if self.fits else ": too much"
        self.watch.planned(
            f"{self.schedule} {self.treatment}",
            f"time {time}, {least:.3f} times the least that it can take{memory}, {held}{fault}",
        )

    def _of_run(self, plan: Plan) -> RunPlan:
        plan = replace(plan, looks_ahead=self.config.model.mtp_num_layers > 0)
        costs = self.request.costs
        return RunPlan(plan, self.layers, costs, self.schedule, self.treatment)
