"""Predict the iteration time and the memory of a job from its model, device and schedule."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from megatron.schedules.catalogue import SCHEDULES
from megatron.schedules.costs import Costs
from megatron.schedules.lower import lower
from megatron.schedules.make_plan import make_plan
from megatron.schedules.plan import Plan
from megatron.schedules.search.bound import least_time
from megatron.schedules.search.fastest import fastest
from megatron.schedules.treatments import TREATMENTS, Treatment
from megatron.simulator.costs.device import UNFUSED, Device, Traffic
from megatron.simulator.costs.from_model import ModelTimes
from megatron.simulator.costs.model_bytes import (
    FP16_PARAMETER,
    UNFUSED_LOGITS,
    LogitBytes,
    model_sizes,
)
from megatron.simulator.costs.peak_bytes import Sizes
from megatron.simulator.costs.shape import Shape, iteration_flops
from megatron.simulator.costs.stage_costs import StageCosts, even_layers, stage_costs
from megatron.simulator.forecast import Forecast, forecast
from megatron.simulator.simulate import simulate


@dataclass(frozen=True)
class PipelineJob:
    """A model on one pipeline, one device a rank.

    Attributes:
        shape: the model's widths and one microbatch.
        layers: transformer layers.
        ranks: pipeline ranks p.
        microbatches: microbatches m of an iteration.
        device: rates of a rank under this treatment of the vocabulary.
        schedule: a name of ``SCHEDULES``.
        vocabulary: a treatment of the vocabulary.
        shortened: whether to fill idle time; if not, passes run in the order of the block.
        last_stage_layers: layers of the last stage, for ``redis``; by default balanced.
        traffic: what the kernels move through memory.
        per_parameter: bytes of a parameter with its gradient and optimizer state.
        logit: bytes of a logit.
    """

    shape: Shape
    layers: int
    ranks: int
    microbatches: int
    device: Device
    schedule: str = "1f1b"
    vocabulary: str = "none"
    shortened: bool = True
    last_stage_layers: int | None = None
    traffic: Traffic = UNFUSED
    per_parameter: float = FP16_PARAMETER
    logit: LogitBytes = UNFUSED_LOGITS

    @cached_property
    def stages(self) -> tuple[tuple[int, int], ...]:
        """(rank, chunk) of every stage in the order of the data."""
        schedule = SCHEDULES[self.schedule]
        return schedule.block(self.ranks, self.microbatches, schedule.chunks).stages

    @cached_property
    def stage_layers(self) -> tuple[int, ...]:
        """Transformer layers of every stage."""
        if self._treatment.redistributed:
            return self._stage_costs.balanced(self.layers, self.last_stage_layers)
        return even_layers(self.layers, len(self.stages))

    @cached_property
    def costs(self) -> Costs:
        """Times of passes and communications, in seconds."""
        return self._stage_costs.costs(self.stage_layers)

    @cached_property
    def sizes(self) -> Sizes:
        """Bytes of the model's parts on every rank."""
        return model_sizes(
            self.shape,
            self.stages,
            self.stage_layers,
            self._treatment,
            per_parameter=self.per_parameter,
            logit=self.logit,
        )

    def plan(self) -> Plan:
        """Return the plan, placed by these costs."""
        return make_plan(
            self.schedule,
            self.vocabulary,
            self.ranks,
            self.microbatches,
            self.costs,
            shortened=self.shortened,
        )

    @cached_property
    def forecast(self) -> Forecast:
        """Forecast of an iteration, without the optimizer's step."""
        program = lower(self.plan(), self.costs)
        return forecast(
            program,
            simulate(program, self.costs),
            self.sizes,
            model_flops=iteration_flops(self.shape, self.layers, self.microbatches),
            peak_flops=self.device.peak_flops,
        )

    @property
    def time(self) -> float:
        """Seconds of an iteration."""
        return self.forecast.seconds

    @cached_property
    def least_time(self) -> float:
        """Seconds that no plan of this job can beat."""
        one = replace(self, microbatches=1, shortened=False).plan()
        return least_time(one, self.costs, self.microbatches)

    @property
    def peak(self) -> float:
        """Bytes of the fullest rank."""
        return max(self.forecast.peak)

    @property
    def _treatment(self) -> Treatment:
        return TREATMENTS[self.vocabulary]

    @cached_property
    def _stage_costs(self) -> StageCosts:
        times = ModelTimes(self.shape, self.device, self.traffic)
        return stage_costs(times, self.stages, self._treatment)


def best(
    jobs: Iterable[PipelineJob], limit: float = inf, indifference: float = 0.0
) -> PipelineJob | None:
    """Return the fastest job that fits the memory, or ``None`` if none fits.

    Args:
        jobs: what to choose from.
        limit: bytes that no rank may exceed.
        indifference: share of the time by which another job must be able to be faster.
    """
    return fastest(jobs, lambda job: job.peak <= limit, indifference)
