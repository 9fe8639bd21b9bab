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
from megatron.schedules.treatments import TREATMENTS
from megatron.simulator.costs.device import UNFUSED, Device, Traffic
from megatron.simulator.costs.from_model import (
    ModelTimes,
    balanced_layers,
    even_layers,
    model_costs,
)
from megatron.simulator.costs.model_bytes import (
    FP16_PARAMETER,
    UNFUSED_LOGITS,
    LogitBytes,
    model_sizes,
)
from megatron.simulator.costs.peak_bytes import Sizes, peak_bytes
from megatron.simulator.costs.shape import Shape, iteration_flops
from megatron.simulator.simulate import simulate


@dataclass(frozen=True)
class Prediction:
    """What a job would reach.

    Attributes:
        schedule: its schedule.
        vocabulary: its treatment of the vocabulary.
        seconds: time of an iteration, without the optimizer's step.
        mfu: model FLOPs as a share of the peak of all devices.
        peak_bytes: memory that every rank holds at most.
    """

    schedule: str
    vocabulary: str
    seconds: float
    mfu: float
    peak_bytes: list[float]


@dataclass(frozen=True)
class PipelineJob:
    """A model on one pipeline, one device a rank.

    Attributes:
        shape: the model's widths and one microbatch.
        layers: transformer layers.
        ranks: pipeline ranks p.
        microbatches: microbatches m of an iteration.
        device: what a rank attains under this treatment of the vocabulary.
        schedule: a name of ``SCHEDULES``.
        vocabulary: a treatment of the vocabulary.
        shortened: fill idle time; without, passes run in the order of the schedule's block.
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
    def stage_layers(self) -> list[int]:
        """Transformer layers of every stage."""
        if TREATMENTS[self.vocabulary].redistributed:
            return balanced_layers(self._times, self.layers, self.stages, self.last_stage_layers)
        return even_layers(self.layers, len(self.stages))

    @cached_property
    def costs(self) -> Costs:
        """Times of passes and communications, in seconds."""
        return model_costs(self._times, self.stages, self.stage_layers, self.vocabulary)

    @cached_property
    def sizes(self) -> Sizes:
        """Bytes of the model's parts on every rank."""
        return model_sizes(
            self.shape,
            self.stages,
            self.stage_layers,
            self.vocabulary,
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

    def predict(self) -> Prediction:
        """Make the plan, simulate it and count what it holds."""
        plan = self.plan()
        seconds = simulate(lower(plan, self.costs), self.costs).end
        peaks = peak_bytes(plan, self.sizes)
        return Prediction(self.schedule, self.vocabulary, seconds, self.mfu(seconds), peaks)

    @property
    def _times(self) -> ModelTimes:
        return ModelTimes(self.shape, self.device, self.traffic)

    def mfu(self, seconds: float) -> float:
        """Return the model FLOPs utilisation of an iteration that takes ``seconds``."""
        flops = iteration_flops(self.shape, self.layers, self.microbatches)
        return flops / (self.ranks * self.device.peak_flops * seconds)

    def least_seconds(self) -> float:
        """Return a time that no plan of this job can beat."""
        one = replace(self, microbatches=1, shortened=False).plan()
        return least_time(one, self.costs, self.microbatches)


def best(
    jobs: Iterable[PipelineJob], limit: float = inf, indifference: float = 0.0
) -> Prediction | None:
    """Return the prediction of the fastest job that fits the memory, or ``None`` if none fits.

    Jobs that cannot beat the best so far are not planned.

    Args:
        jobs: what to choose from.
        limit: bytes that no rank may exceed.
        indifference: share of the time by which another job must be able to be faster.
    """
    found: Prediction | None = None
    for least, _, job in sorted((job.least_seconds(), i, job) for i, job in enumerate(jobs)):
        if found is not None and least >= found.seconds * (1 - indifference):
            break
        prediction = job.predict()
        if max(prediction.peak_bytes) <= limit and (
            found is None or prediction.seconds < found.seconds
        ):
            found = prediction
    return found
