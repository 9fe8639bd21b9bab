"""Forecast of a run on a named GPU, from the count of the run's code."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from megatron.layers.recompute import NO_RECOMPUTATION
from megatron.model.flops import iteration_flops
from megatron.planning.count.run import count_ranks
from megatron.planning.host_room import HostUse, activations_on_host, fullest_host
from megatron.planning.host_share import host_shares
from megatron.planning.host_step import host_steps
from megatron.planning.matrix_steps import matrix_steps
from megatron.planning.message_memory import kept_messages
from megatron.planning.planned_run import RunPlan
from megatron.planning.run_buckets import RankBuckets, run_buckets
from megatron.planning.run_costs import cluster_of, crossing_of, hidden_axes
from megatron.planning.run_memory import Fullest, moved_by_step, run_memory
from megatron.run.run_config import RunConfig
from megatron.schedules.costs import Costs, HopTime
from megatron.schedules.lower import Program
from megatron.schedules.needs import STAGE_KINDS, CommKind
from megatron.schedules.plan import plan_of_one
from megatron.simulator.clocks import Clocks
from megatron.simulator.costs.cluster import Cluster
from megatron.simulator.costs.collective_time import Path
from megatron.simulator.costs.count import RankCount
from megatron.simulator.costs.counted_costs import costs_of, time_once
from megatron.simulator.costs.gpus import Gpu
from megatron.simulator.costs.rank_memory import RankMemory, peaks
from megatron.simulator.costs.replicas import Replicas
from megatron.simulator.crowding import crowded
from megatron.simulator.exchange import Exchanges, Hidden, Overlap, hidden
from megatron.simulator.forecast import Forecast
from megatron.simulator.simulate import Timeline, timeline_of


@dataclass(frozen=True)
class RunForecast:
    """Forecast of a run on a GPU.

    Attributes:
        config: the run.
        run_plan: its plan.
        gpu: the GPU of every rank.
        clocks: the times of the schedule, in seconds.
        outcome: time and memory of an iteration.
        memories: memory of every rank, from which the peaks follow.
        activations_on_host: bytes of every rank's buffers for activations on its host.
        alone: the costs of passes that have the GPU alone.
        exchanges: communication of ranks with the same parameters; ``None``: there are none.
        buckets: buckets of every pipeline rank, if there are replicas.
        model_flops: FLOPs of a replica's iteration, without repeated FLOPs.
        repeated_flops: FLOPs of a replica's iteration that recomputation repeats.
        kept_messages: most bytes of messages that PyTorch may keep on every rank beside its peak.
    """

    config: RunConfig
    run_plan: RunPlan
    gpu: Gpu
    clocks: Clocks
    outcome: Forecast
    memories: Sequence[RankMemory]
    activations_on_host: Sequence[int]
    alone: Costs
    exchanges: Exchanges | None = None
    buckets: Sequence[RankBuckets] = ()
    model_flops: int = 0
    repeated_flops: int = 0
    kept_messages: Sequence[float] = ()

    @cached_property
    def timeline(self) -> Timeline:
        """Timeline of the schedule, in seconds."""
        return timeline_of(self.clocks)

    @cached_property
    def hidden(self) -> Mapping[CommKind, Hidden]:
        """How much of ``exchanges`` the passes hide, by kind of communication."""
        return {} if self.exchanges is None else hidden(self.clocks.program, self.alone)

    @property
    def counts(self) -> Sequence[RankCount]:
        """The work of every pipeline rank for one microbatch."""
        return [own.count for own in self.memories]

    @property
    def samples_per_second(self) -> float:
        """Speed, which can be compared between batch sizes."""
        return self.config.train.global_batch_size / self.outcome.seconds

    @property
    def fits(self) -> bool:
        """Whether every rank has enough memory, on its GPU and on its host."""
        return self.fullest.fits(self.gpu) and self.fits_hosts

    @property
    def fits_hosts(self) -> bool:
        """Whether every machine has enough memory, or nobody knows how much it has."""
        memory = self.config.parallel.offload.memory
        return memory is None or self.host.fits(memory)

    @property
    def host(self) -> HostUse:
        """The bytes on the host of the machine whose ranks keep the most there."""
        states = [own.on_host for own in self.memories]
        return fullest_host(self.config.parallel.placement, states, self.activations_on_host)

    @property
    def fullest(self) -> Fullest:
        """The rank that holds the most."""
        return Fullest.of(self.outcome.peak, self.memories)

    @property
    def padding(self) -> float:
        """The largest padding of a rank's buckets, as a share of the rank's parameters."""
        return max((own.padded / own.parameters - 1 for own in self.buckets), default=0.0)

    @property
    def uneven(self) -> float:
        """By how much the largest part of a replica exceeds the mean, as a share of the mean."""
        return max((own.fullest / own.mean - 1 for own in self.buckets), default=0.0)


def forecast_run(
    config: RunConfig,
    run_plan: RunPlan,
    gpu: Gpu,
    cluster: Cluster | None = None,
    *,
    free: bool = False,
    counts: Sequence[RankCount] | None = None,
) -> RunForecast:
    """Return the forecast of a run with a plan on a GPU.

    Args:
        config: the run.
        run_plan: its plan, which may have been made for another cluster.
        gpu: the GPU of every rank.
        cluster: GPUs and links; ``None``: the GPUs and links of the run.
        free: whether collectives of the vocabulary take no time and slow no pass.
        counts: the work of every pipeline rank; ``None``: that of this project's code.
    """
    plan, parallel, train = run_plan.plan, config.parallel, config.train
    cluster = cluster or cluster_of(parallel, gpu)
    if counts is None:
        counts = count_ranks(config, plan_of_one(plan), run_plan.layers)
    buckets = run_buckets(config, run_plan) if parallel.reduces_gradients else []
    shares = host_shares(config, plan, counts, buckets)
    moved_bytes = moved_by_step(config, counts, shares, buckets)
    whole = matrix_steps(config, cluster, counts, buckets)
    step = [
        cluster.rates.traffic(moved) + own for moved, own in zip(moved_bytes, whole, strict=True)
    ]
    for rank, own in enumerate(host_steps(config, cluster, shares)):
        step[rank] += own.seconds
    exchanges = _exchanges(config, cluster, buckets, step) if buckets else None
    costs = costs_of(counts, plan, cluster, crossing_of(parallel), hidden_axes(parallel))
    program, costs = _priced(run_plan, costs, exchanges, free=free)
    clocks = _simulated(config, cluster, program, costs, free=free)
    memories = run_memory(config, plan, counts, buckets, gpu)
    model_flops = iteration_flops(config.model, train.num_microbatches * train.micro_batch_size)
    outcome = Forecast.of(
        clocks,
        peaks(program, memories),
        model_flops=model_flops / (parallel.tensor.size * parallel.context.size),
        peak_flops=cluster.rates.peak_flops,
        step=max(step) if exchanges is None else exchanges.step,
        once=time_once(counts, cluster),
    )
    return RunForecast(
        config,
        run_plan,
        gpu,
        clocks,
        outcome,
        memories,
        [activations_on_host(program, own.count, rank) for rank, own in enumerate(memories)],
        costs,
        exchanges,
        buckets,
        model_flops=model_flops,
        repeated_flops=_repeated_flops(config, counts, model_flops),
        kept_messages=kept_messages(config, program),
    )


def _priced(
    run_plan: RunPlan, costs: Costs, exchanges: Exchanges | None, *, free: bool
) -> tuple[Program, Costs]:
    """Return the program of an iteration with its ``exchanges``, and its costs."""
    program = run_plan.program
    if free:
        costs = _without_vocabulary(costs)
    return (program, costs) if exchanges is None else exchanges.added_to(program, costs)


def _simulated(
    config: RunConfig, cluster: Cluster, program: Program, costs: Costs, *, free: bool
) -> Clocks:
    """Simulate a program; its passes are slower while collectives are under way."""
    limits, processors = config.parallel.nccl_blocks, cluster.rates.multiprocessors
    vocabulary = 0.0 if free else limits.nccl_max_ctas_vocab / processors
    alone = Clocks(program, costs)
    slowed = crowded(alone, costs, vocabulary, limits.nccl_max_ctas_data / processors)
    return alone if slowed is costs else Clocks(alone.numbered, slowed)


def _without_vocabulary(costs: Costs) -> Costs:
    """Return costs in which collectives of the vocabulary take no time."""
    comms: dict[CommKind, HopTime] = {kind: costs.comms[kind] for kind in STAGE_KINDS}
    return replace(costs, comms=comms, slices=tuple(map(_without_vocabulary, costs.slices)))


def _repeated_flops(config: RunConfig, counts: Sequence[RankCount], model_flops: int) -> int:
    """Return the FLOPs of a replica's iteration beyond the FLOPs of the model."""
    train, parallel = config.train, config.parallel
    if train.recomputation == NO_RECOMPUTATION and not parallel.vocabulary.vocab_recompute:
        return 0
    of_microbatch = sum(own.flops for count in counts for own in count.passes.values())
    sharing = parallel.tensor.size * parallel.context.size
    return max(0, sharing * train.num_microbatches * of_microbatch - model_flops)


def replicas_of(config: RunConfig) -> Replicas:
    """Return the replicas of a run: their number, sharding, and bytes per exchanged gradient."""
    replicas, parallel = config.parallel.replicas, config.parallel
    narrow = torch.bfloat16 in (replicas.reduce_dtype, config.train.gradient_dtype)
    alike = replicas.size if replicas.size > 1 else parallel.expert_copies
    return Replicas(
        alike,
        sharded=replicas.shard_optimizer,
        gradient_bytes=2 if narrow else 4,
    )


def link_of(config: RunConfig, cluster: Cluster) -> Path:
    """Return the link of a rank to its replicas: by the flags of the run, else by the cluster."""
    asked = config.dry_run
    found = cluster.ring("data", config.parallel.replicas.size)
    bandwidth = None if asked is None else asked.replica_bandwidth
    latency = None if asked is None else asked.replica_latency
    return Path(
        found.bandwidth if bandwidth is None else bandwidth,
        found.latency if latency is None else latency,
    )


def _exchanges(
    config: RunConfig, cluster: Cluster, buckets: Sequence[RankBuckets], step: Sequence[float]
) -> Exchanges:
    replicas, found = config.parallel.replicas, replicas_of(config)
    return Exchanges(
        found,
        link_of(config, cluster),
        [own.buckets for own in buckets],
        [own.passed_on * found.count / (found.count - 1) for own in buckets],
        step,
        Overlap(
            reduce=replicas.overlap,
            updates=replicas.shard_optimizer and not config.optimizer.post_validation,
            gather=replicas.overlap_gather,
        ),
        [own.gathered * found.count / (found.count - 1) for own in buckets],
    )
