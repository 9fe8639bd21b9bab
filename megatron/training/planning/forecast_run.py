"""Forecast of a run on a named GPU: the cost model with the run's own numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron.config.run_config import RunConfig
from megatron.kernels.reference.kernels import EXPONENTIALS_AT_ONCE, TILE_ROWS
from megatron.model.config import ModelConfig
from megatron.schedules.lower import lower
from megatron.schedules.plan import Plan
from megatron.schedules.treatments import TREATMENTS
from megatron.simulator.costs.from_model import ModelTimes
from megatron.simulator.costs.gpus import Gpu
from megatron.simulator.costs.model_bytes import LogitBytes
from megatron.simulator.costs.peak_bytes import Sizes
from megatron.simulator.costs.shape import Shape, iteration_flops
from megatron.simulator.costs.stage_costs import stage_costs
from megatron.simulator.costs.training_bytes import (
    of_ranks,
    optimizer_traffic,
    own_logits,
    training_sizes,
)
from megatron.simulator.forecast import Forecast, forecast
from megatron.simulator.simulate import Timeline, simulate
from megatron.training.planning.model_shape import shape_of
from megatron.training.planning.run_plan import RunPlan


class Fullest(NamedTuple):
    """The rank that holds the most.

    Attributes:
        rank: its number in the pipeline.
        peak: the most bytes that it holds.
        static: bytes among them that it always holds.
    """

    rank: int
    peak: float
    static: float

    @classmethod
    def of(cls, peaks: Sequence[float], sizes: Sizes) -> "Fullest":
        """Return the fullest of the ranks that hold ``peaks`` at most."""
        rank = max(range(len(peaks)), key=peaks.__getitem__)
        return cls(rank, peaks[rank], of_ranks(sizes.static)[rank])


@dataclass(frozen=True)
class RunForecast:
    """Forecast of a run on a GPU.

    Attributes:
        config: the run.
        run_plan: its plan.
        gpu: the GPU of every rank.
        timeline: timeline of the schedule, in seconds.
        outcome: time and memory of an iteration.
        sizes: sizes from which the memory follows.
    """

    config: RunConfig
    run_plan: RunPlan
    gpu: Gpu
    timeline: Timeline
    outcome: Forecast
    sizes: Sizes

    @property
    def samples_per_second(self) -> float:
        """Speed, which can be compared between batch sizes."""
        return self.config.train.global_batch_size / self.outcome.seconds

    @property
    def fits(self) -> bool:
        """Whether every rank has enough memory."""
        return max(self.outcome.peak) <= self.gpu.usable

    @property
    def fullest(self) -> Fullest:
        """The rank that holds the most."""
        return Fullest.of(self.outcome.peak, self.sizes)


def own_output_layer(shape: Shape, shards: int) -> LogitBytes:
    """Return the bytes that this project's output layer takes on GPUs.

    Args:
        shape: the model and one microbatch.
        shards: ranks that the vocabulary is split over.
    """
    return own_logits(shape, shards, TILE_ROWS, EXPONENTIALS_AT_ONCE)


def run_sizes(config: RunConfig, plan: Plan, layers: Sequence[int]) -> Sizes:
    """Return what a run holds on every rank of a GPU.

    Args:
        config: the run.
        plan: what runs; its number of microbatches does not matter.
        layers: transformer layers of every stage.
    """
    shape = shape_of(config.model, config.train.micro_batch_size)
    return training_sizes(
        shape,
        plan,
        layers,
        TREATMENTS[config.parallel.vocab_parallel],
        own_output_layer(shape, config.parallel.vocab_shards),
        tied=config.model.tie_embeddings,
        positions=_learned_positions(config.model),
        post_validation=config.optimizer.post_validation,
    )


def forecast_run(config: RunConfig, run_plan: RunPlan, gpu: Gpu) -> RunForecast:
    """Return the forecast of a run with a plan.

    Args:
        config: the run.
        run_plan: its plan.
        gpu: the GPU of every rank.
    """
    plan, layers = run_plan.plan, run_plan.layers
    treatment = TREATMENTS[config.parallel.vocab_parallel]
    shape = shape_of(config.model, config.train.micro_batch_size)
    device, tied = gpu.device(treatment), config.model.tie_embeddings
    times = ModelTimes(shape, device, early_whole=True)
    undoable = config.optimizer.post_validation
    sizes = run_sizes(config, plan, layers)
    moved = optimizer_traffic(shape, plan, layers, treatment, tied=tied, post_validation=undoable)
    costs = stage_costs(times, plan.stages, treatment).costs(layers)
    timeline = simulate(lower(plan, run_plan.costs), costs)
    outcome = forecast(
        plan,
        timeline,
        sizes,
        model_flops=iteration_flops(shape, config.model.num_layers, config.train.num_microbatches),
        peak_flops=device.peak_flops,
        step=device.traffic(moved),
    )
    return RunForecast(config, run_plan, gpu, timeline, outcome, sizes)


def _learned_positions(model: ModelConfig) -> int:
    learned = model.position_embedding_type == "learned_absolute"
    return model.max_position_embeddings if learned else 0
