"""Forecast of a run on a named GPU: the cost model with the run's own numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

import torch

from megatron.config.run_config import RunConfig
from megatron.kernels.cuda.sizes import SPAN, slice_tokens
from megatron.model.config import ModelConfig
from megatron.schedules.lower import lower
from megatron.schedules.needs import CommKind
from megatron.schedules.plan import Plan
from megatron.schedules.treatments import TREATMENTS
from megatron.simulator.costs.from_model import ModelTimes
from megatron.simulator.costs.gpus import REPLICA_LATENCY, Gpu
from megatron.simulator.costs.machines import ONE_MACHINE
from megatron.simulator.costs.model_bytes import LogitBytes
from megatron.simulator.costs.optimizer_bytes import (
    MUON,
    SGD,
    SGD_WITH_MOMENTUM,
    OptimizerBytes,
    narrow_adam,
)
from megatron.simulator.costs.peak_bytes import Sizes
from megatron.simulator.costs.replicas import Link, Replicas
from megatron.simulator.costs.shape import Shape, iteration_flops
from megatron.simulator.costs.stage_costs import stage_costs
from megatron.simulator.costs.training_bytes import (
    of_ranks,
    optimizer_traffic,
    own_logits,
    training_sizes,
)
from megatron.simulator.exchange import Exchanges, Hidden, Overlap, hidden
from megatron.simulator.forecast import Forecast, forecast
from megatron.simulator.simulate import Timeline, simulate
from megatron.training.planning.model_shape import machines_of, shape_of_run
from megatron.training.planning.run_buckets import RankBuckets, run_buckets
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
        exchanges: what is exchanged by ranks with the same parameters; ``None``: there are none.
        hidden: how much of that the passes hide, by kind of communication.
        padding: share of a rank's parameters that its buckets have in addition, at most.
        uneven: share of the mean by which the largest part of a replica exceeds it.
        model_flops: FLOPs of a replica's iteration, without what is repeated.
        repeated_flops: FLOPs that its backwards repeat.
    """

    config: RunConfig
    run_plan: RunPlan
    gpu: Gpu
    timeline: Timeline
    outcome: Forecast
    sizes: Sizes
    exchanges: Exchanges | None = None
    hidden: Mapping[CommKind, Hidden] = field(default_factory=dict)
    padding: float = 0.0
    uneven: float = 0.0
    model_flops: int = 0
    repeated_flops: int = 0

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
    rows = -(-shape.vocab_size // shards)
    return own_logits(shape, shards, slice_tokens(rows, shape.tokens, again=True), SPAN)


def run_sizes(
    config: RunConfig,
    plan: Plan,
    layers: Sequence[int],
    buckets: Sequence[RankBuckets] = (),
) -> Sizes:
    """Return what a run holds on every rank of a GPU.

    Args:
        config: the run.
        plan: what runs; its number of microbatches does not matter.
        layers: transformer layers of every stage.
        buckets: of every rank, if there are replicas; without them the result is too low by their
            padding and the copies in which they are reduced.
    """
    shape = shape_of_run(config)
    sizes = training_sizes(
        shape,
        plan,
        layers,
        TREATMENTS[config.parallel.vocab_parallel],
        own_output_layer(shape, config.parallel.vocab_shards),
        tied=config.model.tie_embeddings,
        positions=_learned_positions(config.model),
        changes_words=config.model.embed_layernorm or config.model.embedding_multiplier != 1,
        post_validation=config.optimizer.post_validation,
        replicas=replicas_of(config),
        padding=_padding(buckets),
        optimizer=optimizer_bytes(config),
    )
    return _with_copies(sizes, config, buckets)


def _padding(buckets: Sequence[RankBuckets]) -> float:
    """Return the share of a rank's parameters that its buckets have in addition, at most."""
    return max((own.padded / own.parameters - 1 for own in buckets), default=0.0)


def _unevenness(buckets: Sequence[RankBuckets], replicas: int) -> float:
    """Return by which share of the mean the largest part of a replica exceeds it, at most."""
    return max((own.fullest * replicas / own.padded - 1 for own in buckets), default=0.0)


def _with_copies(sizes: Sizes, config: RunConfig, buckets: Sequence[RankBuckets]) -> Sizes:
    """Add the copy of a bucket in which gradients are reduced, if that has another type.

    Reductions follow one another, so the largest copy counts. It is there after the last pass, or,
    where reductions overlap with passes, at any time.
    """
    replicas = config.parallel.replicas
    if not buckets or replicas.reduce_dtype in (None, config.train.gradient_dtype):
        return sizes
    copies = [replicas_of(config).gradient_bytes * own.largest for own in buckets]
    if not replicas.overlap:
        return replace(sizes, afterwards=copies)
    static = zip(of_ranks(sizes.static), copies, strict=True)
    return replace(sizes, static=[held + copy for held, copy in static])


def optimizer_bytes(config: RunConfig) -> OptimizerBytes:
    """Return what the optimizer of a run keeps of a parameter."""
    optimizer, train = config.optimizer, config.train
    if optimizer.optimizer == "sgd":
        return SGD_WITH_MOMENTUM if optimizer.sgd_momentum else SGD
    if optimizer.optimizer == "muon":
        return MUON
    return narrow_adam(
        first=optimizer.exp_avg_dtype == "bf16",
        second=optimizer.exp_avg_sq_dtype == "bf16",
        gradient=train.gradient_dtype == torch.bfloat16,
    )


def forecast_run(config: RunConfig, run_plan: RunPlan, gpu: Gpu) -> RunForecast:
    """Return the forecast of a run with a plan.

    Args:
        config: the run.
        run_plan: its plan.
        gpu: the GPU of every rank.
    """
    plan = run_plan.plan
    treatment = TREATMENTS[config.parallel.vocab_parallel]
    shape = shape_of_run(config)
    device = gpu.device(treatment)
    links, machines = config.parallel.interconnect, ONE_MACHINE
    if links is not None:
        device = links.on(device)
        machines = machines_of(config.parallel, links.network)
    times = ModelTimes(
        shape, device, early_whole=True, split_backward=plan.split_backward, machines=machines
    )
    costs = stage_costs(times, plan.stages, treatment).costs(run_plan.layers)
    program = lower(plan, run_plan.costs)
    step = [device.traffic(moved) for moved in _moved_by_step(config, run_plan, shape)]
    exchanges, buckets = None, list[RankBuckets]()
    kept: Mapping[CommKind, Hidden] = {}
    if config.parallel.replicas.size > 1:
        buckets = run_buckets(config, run_plan)
        exchanges = _exchanges(config, gpu, buckets, step)
        program, costs = exchanges.added_to(program, costs)
        kept = hidden(program, costs)
    timeline = simulate(program, costs)
    sizes = run_sizes(config, plan, run_plan.layers, buckets)
    microbatches = config.train.num_microbatches
    sharing = config.parallel.tensor_size * config.parallel.context_size
    model_flops = iteration_flops(shape, config.model.num_layers, microbatches)
    outcome = forecast(
        program,
        timeline,
        sizes,
        model_flops=model_flops / sharing,
        peak_flops=device.peak_flops,
        step=max(step) if exchanges is None else exchanges.step,
    )
    return RunForecast(
        config,
        run_plan,
        gpu,
        timeline,
        outcome,
        sizes,
        exchanges,
        kept,
        _padding(buckets),
        _unevenness(buckets, config.parallel.replicas.size),
        model_flops=model_flops,
        repeated_flops=sharing * microbatches * _repeated_flops(shape, run_plan.layers),
    )


def _repeated_flops(shape: Shape, layers: Sequence[int]) -> int:
    """Return the FLOPs that a rank of every stage repeats together for a microbatch."""
    stages = map(shape.stage_repeated_flops, layers, accumulate([0, *layers]))
    return sum(stages) + shape.depths * shape.depth_repeated_flops


def replicas_of(config: RunConfig) -> Replicas:
    """Return how many replicas a run has, and what they exchange."""
    replicas = config.parallel.replicas
    narrow = torch.bfloat16 in (replicas.reduce_dtype, config.train.gradient_dtype)
    return Replicas(
        replicas.size,
        sharded=replicas.shard_optimizer,
        gradient_bytes=2 if narrow else 4,
    )


def link_of(config: RunConfig, gpu: Gpu) -> Link:
    """Return what connects a rank with its replicas: as the run says, or as GPUs usually have."""
    asked = config.dry_run
    bandwidth = None if asked is None else asked.replica_bandwidth
    latency = None if asked is None else asked.replica_latency
    return Link(
        gpu.network if bandwidth is None else bandwidth,
        REPLICA_LATENCY if latency is None else latency,
    )


def _exchanges(
    config: RunConfig, gpu: Gpu, buckets: Sequence[RankBuckets], step: Sequence[float]
) -> Exchanges:
    replicas = config.parallel.replicas
    return Exchanges(
        replicas_of(config),
        link_of(config, gpu),
        [own.buckets for own in buckets],
        [own.padded for own in buckets],
        step,
        Overlap(
            reduce=replicas.overlap,
            updates=replicas.shard_optimizer and not config.optimizer.post_validation,
            gather=replicas.overlap_gather,
        ),
    )


def _moved_by_step(config: RunConfig, run_plan: RunPlan, shape: Shape) -> list[float]:
    """Return the bytes that the optimizer's step moves on every rank."""
    return optimizer_traffic(
        shape,
        run_plan.plan,
        run_plan.layers,
        TREATMENTS[config.parallel.vocab_parallel],
        tied=config.model.tie_embeddings,
        post_validation=config.optimizer.post_validation,
        replicas=replicas_of(config),
        optimizer=optimizer_bytes(config),
    )


def _learned_positions(model: ModelConfig) -> int:
    learned = model.position_embedding_type == "learned_absolute"
    return model.max_position_embeddings if learned else 0
