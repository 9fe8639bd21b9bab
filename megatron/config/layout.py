"""How the model is laid out over the ranks of the job: the configuration of all its axes."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from megatron.config.cluster import (
    ClusterFlags,
    block_limits,
    known_gpu,
    links_of,
    ranks_of_machine,
)
from megatron.config.groups import Flags, copied
from megatron.config.log import LogFlags
from megatron.config.parallelism import ParallelFlags, on_cuda
from megatron.config.pipeline import settle_pipeline
from megatron.config.recompute import RecomputeFlags
from megatron.config.replicas import ReplicaConfig, replica_config
from megatron.config.schedule import PipelineFlags
from megatron.model.distribution import LayerDistribution
from megatron.parallel.grid import Grid
from megatron.parallel.nccl import BlockLimits
from megatron.parallel.placement import Placement
from megatron.schedules.treatments import TREATMENTS
from megatron.simulator.costs.collective_time import Links
from megatron.simulator.costs.gpus import Gpu


@dataclass(frozen=True)
class ParallelConfig:
    """How the model is laid out over the ranks of the job.

    Attributes:
        pipeline_size: pipeline ranks p.
        vocab_parallel: treatment of the vocabulary layers, a name of ``TREATMENTS``.
        pipeline_schedule: schedule of the passes, a name of ``TRAINABLE_SCHEDULES``.
        padded_vocab_size: rows of the whole vocabulary matrix, a multiple of ``vocab_shards``.
        device: kind of device that every rank computes on.
        backend: communication library of the process groups.
        timeout_minutes: how long a collective may wait before the job is given up.
        virtual_stages: model chunks of a rank, for a schedule of ``CHUNKED_SCHEDULES``;
            ``None``: as few as the schedule needs.
        layers: how transformer layers are spread over the stages.
        schedule_file: file of the plan in text form, for the schedule ``file``.
        memory_limit: the most microbatches that a rank may have in flight.
        recompute_ahead: layers are computed again in passes of their own, and a rank holds so many
            chunks between these and their B; ``None``: within B.
        measured_costs: file of measured costs to plan with; ``None``: by FLOPs.
        replicas: data parallelism.
        search_seconds: time of the search for a plan; ``None``: as long as it takes. With a limit
            the plan depends on the machine, so all ranks take that of rank 0.
        advice_seconds: time to look for other settings if a dry run does not fit.
        tensor_size: tensor-parallel ranks t.
        sequence_parallel: whether each of them has its own part of the sequence outside of
            attention and MLP.
        context_size: context-parallel ranks c, which share every sequence.
        numa_binding: let ranks run on CPUs that are close to their GPUs.
        nccl_blocks: thread blocks that NCCL may use.
        ranks_per_machine: of the job; ``None``: all are in one machine.
        gpu: of every rank; ``None``: not known, so plans are made by FLOPs, and communication is
            free.
        links: between the GPUs; ``None``: as that kind of GPU usually has.
    """

    pipeline_size: int
    vocab_parallel: str
    pipeline_schedule: str
    padded_vocab_size: int
    device: Literal["cpu", "cuda"]
    backend: Literal["gloo", "nccl"]
    timeout_minutes: int
    virtual_stages: int | None = None
    layers: LayerDistribution = field(default_factory=LayerDistribution)
    schedule_file: Path | None = None
    memory_limit: float | None = None
    recompute_ahead: int | None = None
    measured_costs: Path | None = None
    replicas: ReplicaConfig = field(default_factory=ReplicaConfig)
    search_seconds: float | None = None
    advice_seconds: float = 20.0
    tensor_size: int = 1
    sequence_parallel: bool = False
    context_size: int = 1
    nccl_blocks: BlockLimits = field(default_factory=BlockLimits)
    ranks_per_machine: int | None = None
    numa_binding: bool = False
    gpu: Gpu | None = None
    links: Links | None = None

    @property
    def grid(self) -> Grid:
        """All ranks of the job."""
        replicas = self.replicas
        assert replicas.size % self.context_size == 0, "each replica has all parts of a sequence"
        return Grid(
            self.tensor_size,
            replicas.size // self.context_size,
            self.pipeline_size,
            replicas.order,
            self.context_size,
        )

    @property
    def placement(self) -> Placement:
        """How its ranks lie in machines."""
        return Placement(self.grid, self.ranks_per_machine or self.grid.world_size)

    @property
    def vocab_shards(self) -> int:
        """Parts into which the vocabulary matrix is cut: P = p x t, or t without the pipeline."""
        sharded = TREATMENTS[self.vocab_parallel].is_sharded
        return self.tensor_size * (self.pipeline_size if sharded else 1)


def parallel_config(flags: Flags, vocab_size: int, replicas: int, treatment: str) -> ParallelConfig:
    """The layout; the vocabulary is padded so that every shard has the same, round, size.

    Args:
        flags: as given.
        vocab_size: entries of the vocabulary.
        replicas: of the model.
        treatment: of the vocabulary.
    """
    parallel, pipeline = flags[ParallelFlags], settle_pipeline(flags, treatment)
    cuda, own_gpu = on_cuda(flags), known_gpu(flags)
    layout = copied(
        ParallelConfig,
        flags[PipelineFlags],
        pipeline_size=parallel.pipeline_model_parallel_size,
        tensor_size=parallel.tensor_model_parallel_size,
        sequence_parallel=parallel.sequence_parallel and parallel.tensor_model_parallel_size > 1,
        context_size=parallel.context_parallel_size,
        vocab_parallel=treatment,
        pipeline_schedule=pipeline.schedule,
        padded_vocab_size=vocab_size,
        device="cuda" if cuda else "cpu",
        backend="nccl" if cuda else "gloo",
        timeout_minutes=parallel.distributed_timeout_minutes,
        virtual_stages=pipeline.virtual_stages,
        layers=pipeline.layers,
        memory_limit=flags[PipelineFlags].zero_bubble_max_pending_backward,
        recompute_ahead=flags[RecomputeFlags].recompute_ahead,
        replicas=replica_config(flags, replicas),
        ranks_per_machine=ranks_of_machine(flags[ClusterFlags], dry_run=flags[LogFlags].dry_run),
        numa_binding=cuda and not flags[ClusterFlags].no_numa_binding,
        nccl_blocks=block_limits(flags[ClusterFlags]),
        gpu=own_gpu,
        links=None if own_gpu is None else links_of(flags[ClusterFlags], own_gpu),
    )
    multiple = parallel.make_vocab_size_divisible_by * layout.vocab_shards
    return replace(layout, padded_vocab_size=-(-vocab_size // multiple) * multiple)
