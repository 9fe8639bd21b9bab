"""Forecast of a run on a named GPU, from the count of the run's code."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from megatron.config.run_config import RunConfig
from megatron.layers.recompute import NO_RECOMPUTATION
from megatron.model.flops import iteration_flops
from megatron.schedules.lower import Program, lower
from megatron.schedules.needs import STAGE_KINDS, CommKind
from megatron.schedules.plan import plan_of_one
from megatron.simulator.costs.cluster import Cluster
from megatron.simulator.costs.count import RankCount
from megatron.simulator.costs.counted_costs import costs_of, time_once
from megatron.simulator.costs.gpus import Gpu
from megatron.simulator.costs.rank_memory import RankMemory, peaks
from megatron.simulator.costs.replicas import Link, Replicas
from megatron.simulator.crowding import crowded
from megatron.simulator.exchange import Exchanges, Hidden, Overlap, hidden
from megatron.simulator.forecast import Forecast
from megatron.simulator.simulate import Timeline, simulate
from megatron.simulator.units import MEMORY
from megatron.training.planning.count.run import count_ranks
from megatron.training.planning.planned_run import RunPlan
from megatron.training.planning.run_buckets import RankBuckets, run_buckets
from megatron.training.planning.run_costs import cluster_of, crossing_of
from megatron.training.planning.run_memory import moved_by_step, run_memory


class Fullest(NamedTuple):
    """The rank that holds the most.

    Attributes:
        rank: its number in the pipeline.
        peak: the most bytes that it holds.
        static: bytes among them that it always holds.
        outside: bytes of its NCCL communicators by estimate, beside the peak.
    """

    rank: int
    peak: float
    static: float
    outside: float = 0.0

    @classmethod
    def of(cls, peaks: Sequence[float], memories: Sequence[RankMemory]) -> "Fullest":
        """Return the fullest of the ranks that hold ``peaks`` at most."""
        rank = max(range(len(peaks)), key=lambda own: peaks[own] + memories[own].outside)
        return cls(rank, peaks[rank], memories[rank].always, memories[rank].outside)

    def room(self, gpu: Gpu) -> float:
        """Return the bytes that tensors can use on the rank's GPU, beside its communicators."""
        return gpu.usable - self.outside

    def room_in_words(self, gpu: Gpu) -> str:
        """Return those bytes in words."""
        return f"tensors can use {MEMORY.write(self.room(gpu))} of {gpu.name}"

    def fits(self, gpu: Gpu) -> bool:
        """Return whether the rank's tensors fit a GPU, and so those of every other rank."""
        return self.peak <= self.room(gpu)


@dataclass(frozen=True)
class RunForecast:
    """Forecast of a run on a GPU.

    Attributes:
        config: the run.
        run_plan: its plan.
        gpu: the GPU of every rank.
        timeline: timeline of the schedule, in seconds.
        outcome: time and memory of an iteration.
        memories: memory of every rank, from which the peaks follow.
        exchanges: communication of ranks with the same parameters; ``None``: there are none.
        hidden: how much of ``exchanges`` the passes hide, by kind of communication.
        padding: padding of a rank's buckets as a share of the rank's parameters; the largest.
        uneven: how much larger the largest part of a replica is than the mean part, as a share of
            the mean.
        model_flops: FLOPs of a replica's iteration, without repeated ones.
        repeated_flops: FLOPs of a replica's iteration that backwards repeat.
    """

    config: RunConfig
    run_plan: RunPlan
    gpu: Gpu
    timeline: Timeline
    outcome: Forecast
    memories: Sequence[RankMemory]
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
        return self.fullest.fits(self.gpu)

    @property
    def fullest(self) -> Fullest:
        """The rank that holds the most."""
        return Fullest.of(self.outcome.peak, self.memories)


def _padding(buckets: Sequence[RankBuckets]) -> float:
    """Return the largest padding of a rank's buckets, as a share of the rank's parameters."""
    return max((own.padded / own.parameters - 1 for own in buckets), default=0.0)


def _unevenness(buckets: Sequence[RankBuckets], replicas: int) -> float:
    """Return how much larger than the mean a replica's part is at most, as a share of the mean."""
    return max((own.fullest * replicas / own.padded - 1 for own in buckets), default=0.0)


@dataclass(frozen=True)
class _Timed:
    """An iteration on a cluster.

    Attributes:
        program: of an iteration, with the communication of replicas.
        timeline: of the program.
        step: seconds of the optimizer's step after the timeline.
        once: seconds of work that an iteration does once, as ``time_once`` returns.
        exchanges: communication of replicas; ``None``: there are none.
        buckets: of every pipeline rank, if there are replicas.
        hidden: how much of ``exchanges`` the passes hide, by kind of communication.
    """

    program: Program
    timeline: Timeline
    step: float
    once: float
    exchanges: Exchanges | None = None
    buckets: Sequence[RankBuckets] = ()
    hidden: Mapping[CommKind, Hidden] = field(default_factory=dict)


def _timed(
    config: RunConfig,
    run_plan: RunPlan,
    cluster: Cluster,
    counts: Sequence[RankCount],
    *,
    free: bool = False,
) -> _Timed:
    """Return an iteration on a cluster; with ``free`` as in ``seconds_on``."""
    plan, parallel = run_plan.plan, config.parallel
    costs = costs_of(counts, plan, cluster, crossing_of(parallel))
    if free:
        costs = replace(costs, comms={kind: costs.comms[kind] for kind in STAGE_KINDS})
    program = lower(plan, run_plan.costs)
    step = [cluster.rates.traffic(moved) for moved in moved_by_step(config, counts)]
    exchanges, buckets = None, list[RankBuckets]()
    kept: Mapping[CommKind, Hidden] = {}
    if parallel.replicas.size > 1:
        buckets = run_buckets(config, run_plan)
        exchanges = _exchanges(config, cluster, buckets, step)
        program, costs = exchanges.added_to(program, costs)
        kept = {} if free else hidden(program, costs)
    limits, processors = parallel.nccl_blocks, cluster.rates.multiprocessors
    vocabulary = 0.0 if free else limits.vocabulary / processors
    costs = crowded(program, costs, vocabulary, limits.gradients / processors)
    after = max(step) if exchanges is None else exchanges.step
    once = time_once(counts, cluster)
    return _Timed(program, simulate(program, costs), after, once, exchanges, buckets, kept)


def seconds_on(
    config: RunConfig, run_plan: RunPlan, cluster: Cluster, *, free: bool = False
) -> float:
    """Return the seconds of an iteration of a run's plan on any cluster.

    Args:
        config: the run.
        run_plan: its plan.
        cluster: GPUs and links; the plan may have been made for others.
        free: whether collectives of the vocabulary take no time and slow no pass.
    """
    counts = count_ranks(config, plan_of_one(run_plan.plan), run_plan.layers)
    timed = _timed(config, run_plan, cluster, counts, free=free)
    return timed.timeline.end + timed.once + timed.step


def forecast_run(config: RunConfig, run_plan: RunPlan, gpu: Gpu) -> RunForecast:
    """Return the forecast of a run with a plan.

    Args:
        config: the run.
        run_plan: its plan.
        gpu: the GPU of every rank.
    """
    plan, cluster = run_plan.plan, cluster_of(config.parallel, gpu)
    counts = count_ranks(config, plan_of_one(plan), run_plan.layers)
    timed = _timed(config, run_plan, cluster, counts)
    exchanges, buckets, timeline = timed.exchanges, timed.buckets, timed.timeline
    memories = run_memory(config, plan, counts, buckets)
    sharing = config.parallel.tensor_size * config.parallel.context_size
    train = config.train
    model_flops = iteration_flops(config.model, train.num_microbatches * train.micro_batch_size)
    outcome = Forecast.of(
        timeline,
        peaks(timed.program, memories),
        model_flops=model_flops / sharing,
        peak_flops=cluster.rates.peak_flops,
        step=timed.step,
        once=timed.once,
    )
    return RunForecast(
        config,
        run_plan,
        gpu,
        timeline,
        outcome,
        memories,
        exchanges,
        timed.hidden,
        _padding(buckets),
        _unevenness(buckets, config.parallel.replicas.size),
        model_flops=model_flops,
        repeated_flops=_repeated_flops(config, counts, model_flops),
    )


def _repeated_flops(config: RunConfig, counts: Sequence[RankCount], model_flops: int) -> int:
    """Return the FLOPs of a replica's iteration beside those of the model."""
    train, parallel = config.train, config.parallel
    if train.recomputation == NO_RECOMPUTATION and not train.vocab_recompute:
        return 0
    of_microbatch = sum(own.flops for count in counts for own in count.passes.values())
    sharing = parallel.tensor_size * parallel.context_size
    return max(0, sharing * train.num_microbatches * of_microbatch - model_flops)


def replicas_of(config: RunConfig) -> Replicas:
    """Return the replicas of a run: their number, and the types in which they exchange."""
    replicas = config.parallel.replicas
    narrow = torch.bfloat16 in (replicas.reduce_dtype, config.train.gradient_dtype)
    return Replicas(
        replicas.size,
        sharded=replicas.shard_optimizer,
        gradient_bytes=2 if narrow else 4,
    )


def link_of(config: RunConfig, cluster: Cluster) -> Link:
    """Return the link of a rank to its replicas: as the run says, or as such GPUs usually have."""
    asked = config.dry_run
    found = cluster.ring("data", config.parallel.replicas.size)
    bandwidth = None if asked is None else asked.replica_bandwidth
    latency = None if asked is None else asked.replica_latency
    return Link(
        found.bandwidth if bandwidth is None else bandwidth,
        found.latency if latency is None else latency,
    )


def _exchanges(
    config: RunConfig, cluster: Cluster, buckets: Sequence[RankBuckets], step: Sequence[float]
) -> Exchanges:
    replicas = config.parallel.replicas
    return Exchanges(
        replicas_of(config),
        link_of(config, cluster),
        [own.buckets for own in buckets],
        [own.padded for own in buckets],
        step,
        Overlap(
            reduce=replicas.overlap,
            updates=replicas.shard_optimizer and not config.optimizer.post_validation,
            gather=replicas.overlap_gather,
        ),
    )
