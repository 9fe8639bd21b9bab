"""How the ranks of a job share a model, as frozen data made from the flags of several topics."""

from dataclasses import dataclass, field, replace

from megatron.flags.groups import Flags
from megatron.layers.recompute_settings import RecomputeSettings
from megatron.layers.vocabulary.settings import ShardSettings
from megatron.model.distribution import LayerDistribution
from megatron.parallel.context_settings import ContextRankSettings
from megatron.parallel.grid import Grid
from megatron.parallel.placement import Placement
from megatron.parallel.settings import (
    BlockSettings,
    DeviceSettings,
    ExpertRankSettings,
    PipelineRankSettings,
    ReplicaSettings,
    TensorRankSettings,
)
from megatron.run.cluster import (
    known_gpu,
    linked_ranks,
    ranks_of_machine,
)
from megatron.run.expert_ranks import expert_ranks
from megatron.run.own_memory import OwnMemory
from megatron.run.pairs import pairs_of
from megatron.run.replicas import replicas_of
from megatron.run.schedule import (
    chunks_of,
    leaves_one_chunk,
    schedule_of,
    treatment_of,
    uses_limit,
)
from megatron.run.stages import distribution_of
from megatron.schedules.block_options import BlockOptions
from megatron.schedules.settings import (
    OffloadSettings,
    PairSettings,
    PlanSettings,
    ScheduleSettings,
    SliceSettings,
)
from megatron.schedules.treatment_settings import TreatmentSettings
from megatron.schedules.treatments import TREATMENTS
from megatron.simulator.costs.collective_time import Links
from megatron.simulator.costs.gpus import Gpu
from megatron.simulator.costs.settings import ClusterSettings


@dataclass(frozen=True)
class ParallelConfig:
    """How the model is laid out over the ranks of the job.

    Attributes:
        pipeline: pipeline ranks.
        schedule: schedule of the passes, and the chunks of a rank.
        treatment: treatment of the vocabulary layers.
        padded_vocab_size: rows of the whole vocabulary matrix, a multiple of ``vocab_shards``.
        devices: kind of device that every rank computes on, and the communication library.
        vocabulary: shards of the vocabulary layers.
        layers: how transformer layers are spread over the stages.
        recompute_ahead: with layers that are computed again in passes of their own (R), the most
            chunks that a rank may hold between R and B; ``None``: B computes layers again.
        replicas: data parallelism.
        planning: how a plan is found.
        block_options: options that only some schedules take.
        tensor: tensor-parallel ranks.
        context: context-parallel ranks, and how attention sees the tokens of all of them.
        experts: the ranks that have the experts of a layer.
        pairs: which passes run in turns.
        slices: how microbatches are cut.
        nccl_blocks: thread blocks that NCCL may use.
        cluster: machines and links. Without ``ranks_per_node`` one machine has all ranks.
        memory: the smallest memory of all ranks, once they have met, in a run with a limit by
            memory. ``None``: the run is planned for the memory of this rank.
        gpu: kind of every rank's GPU. ``None``: the kind is not known. Plans are then made by
            FLOPs, and communication takes no time in them.
        offload: activations that wait on the host.
    """

    schedule: ScheduleSettings
    treatment: TreatmentSettings
    padded_vocab_size: int
    devices: DeviceSettings
    pipeline: PipelineRankSettings = field(default_factory=PipelineRankSettings)
    vocabulary: ShardSettings = field(default_factory=ShardSettings)
    layers: LayerDistribution = field(default_factory=LayerDistribution)
    recompute_ahead: int | None = None
    replicas: ReplicaSettings = field(default_factory=ReplicaSettings)
    planning: PlanSettings = field(default_factory=PlanSettings)
    block_options: BlockOptions = field(default_factory=BlockOptions)
    tensor: TensorRankSettings = field(default_factory=TensorRankSettings)
    context: ContextRankSettings = field(default_factory=ContextRankSettings)
    slices: SliceSettings = field(default_factory=SliceSettings)
    experts: ExpertRankSettings = field(default_factory=ExpertRankSettings)
    pairs: PairSettings = field(default_factory=PairSettings)
    nccl_blocks: BlockSettings = field(default_factory=BlockSettings)
    cluster: ClusterSettings = field(default_factory=ClusterSettings)
    memory: OwnMemory | None = None
    gpu: Gpu | None = None
    offload: OffloadSettings = field(default_factory=OffloadSettings)

    @property
    def grid(self) -> Grid:
        """All ranks of the job."""
        replicas = self.replicas
        assert replicas.size % self.context.size == 0, "each replica has all parts of a sequence"
        return Grid(
            self.tensor.size,
            replicas.size // self.context.size,
            self.pipeline.size,
            replicas.order,
            self.context.size,
            self.experts.expert_model_parallel_size,
            self.experts.expert_tensor_parallel_size,
            self.context.heads_size,
        )

    @property
    def expert_copies(self) -> int:
        """Ranks that have the same experts, if experts are spread; else those of a parameter."""
        return self.grid.expert_copies if self.grid.spreads_experts else self.replicas.size

    @property
    def reduces_gradients(self) -> bool:
        """Whether several ranks have the same parameters."""
        return max(self.replicas.size, self.expert_copies) > 1

    @property
    def placement(self) -> Placement:
        """How the ranks are placed in machines."""
        return Placement(self.grid, self.cluster.ranks_per_node or self.grid.world_size)

    @property
    def domains(self) -> Placement:
        """How the ranks are placed in domains, in which links connect all of them.

        A domain is a machine, or several machines whose GPUs NVLink connects.
        """
        world = self.grid.world_size
        return Placement(self.grid, linked_ranks(world, self.cluster.ranks_per_node, self.gpu))

    @property
    def links(self) -> Links | None:
        """Links between the GPUs, if their kind is known."""
        return None if self.gpu is None else self.cluster.links(self.gpu)

    @property
    def pipeline_schedule(self) -> str:
        """Schedule of the passes, a name of ``TRAINABLE_SCHEDULES``."""
        return self.schedule.name

    @property
    def vocab_parallel(self) -> str:
        """Treatment of the vocabulary layers, a name of ``TREATMENTS``."""
        return self.treatment.name

    @property
    def vocab_shards(self) -> int:
        """Parts of the vocabulary matrix: p x t, or t if the pipeline does not split it."""
        sharded = TREATMENTS[self.vocab_parallel].is_sharded
        return self.tensor.size * (self.pipeline.size if sharded else 1)


def parallel_config(flags: Flags, vocab_size: int, replicas: int) -> ParallelConfig:
    """Return the layout.

    The vocabulary is padded, so that every shard has equally many rows, a multiple of
    --make-vocab-size-divisible-by.
    """
    treatment = treatment_of(flags)
    layout = ParallelConfig(
        pipeline=flags[PipelineRankSettings],
        tensor=flags[TensorRankSettings].resolved(),
        context=flags[ContextRankSettings].resolved(),
        vocabulary=flags[ShardSettings],
        slices=flags[SliceSettings],
        experts=expert_ranks(flags),
        pairs=pairs_of(flags),
        schedule=flags[ScheduleSettings].named(
            schedule_of(flags), None if leaves_one_chunk(flags) else chunks_of(flags)
        ),
        treatment=flags[TreatmentSettings].named(treatment),
        padded_vocab_size=vocab_size,
        devices=flags[DeviceSettings].resolved(),
        layers=distribution_of(flags, treatment),
        planning=_planning(flags),
        block_options=flags[BlockOptions],
        recompute_ahead=flags[RecomputeSettings].recompute_ahead,
        offload=flags[OffloadSettings],
        replicas=replicas_of(flags, replicas),
        cluster=replace(flags[ClusterSettings], ranks_per_node=ranks_of_machine(flags)),
        nccl_blocks=flags[BlockSettings],
        gpu=known_gpu(flags),
    )
    rows = layout.vocabulary.padded(vocab_size, layout.vocab_shards)
    return replace(layout, padded_vocab_size=rows)


def _planning(flags: Flags) -> PlanSettings:
    """Return how a plan is found, without a limit by memory that no plan depends on."""
    own = flags[PlanSettings]
    return own.with_limit(own.limit_by_memory if uses_limit(flags) else None)
