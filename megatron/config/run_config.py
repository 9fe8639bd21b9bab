"""A whole run as frozen data, made from the flags once, at the entrypoint.

All defaults are resolved except the peak speed of the device, which is measured later. Code below
the entrypoint sees no flags. The configurations here join several topics.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from megatron.checkpoint.config import CheckpointConfig
from megatron.config.checkpoint import CheckpointFlags, checkpoint_config
from megatron.config.choices import closed_notes, ways
from megatron.config.cluster import (
    ClusterFlags,
    block_limits,
    known_gpu,
    links_of,
    ranks_of_machine,
)
from megatron.config.corpora import (
    flags_of_corpora,
    gives_splits,
    own_paths,
    reads_ahead,
    sets_to_evaluate,
    shared_blend,
)
from megatron.config.data import CorpusFlags, DataFlags, parse_split
from megatron.config.deep_ep import DeepEPFlags
from megatron.config.eight_bits import EightBitFlags, eight_bit_config, engine_multiplies
from megatron.config.expert_ranks import ExpertRanks, expert_ranks
from megatron.config.experts import upcycling_of
from megatron.config.graphs import GRAPH_NOTES, captures_passes
from megatron.config.grouped_products import grouped_package
from megatron.config.guard import GuardConfig, GuardFlags, guard_config
from megatron.config.layers import model_config
from megatron.config.log import DryRun, LogConfig, LogFlags, dry_run_config, log_config
from megatron.config.model import ModelFlags
from megatron.config.offload import could_offload, host_bandwidth, offloaded_chunks
from megatron.config.offload_states import host_states
from megatron.config.optimizer_kind import optimizer_config
from megatron.config.parallelism import (
    ContextChoice,
    ParallelFlags,
    adjacent_heads,
    context_choices,
    first_exchange,
    number_of_replicas,
    on_cuda,
)
from megatron.config.precision import PrecisionFlags, activation_dtype, gradient_dtype
from megatron.config.recompute import RecomputeFlags, recomputation_of
from megatron.config.records import RecordFlags, record_config
from megatron.config.replicas import ReplicaConfig, replica_config
from megatron.config.schedule import (
    PipelineFlags,
    chunks_of,
    leaves_one_chunk,
    schedule_of,
    treatment_of,
)
from megatron.config.slices import (
    SLICE_RULES,
    SliceFlags,
    SlicesChoice,
    possible_slices,
    strategy_of,
)
from megatron.config.stages import distribution_of
from megatron.config.tokenizer import FillFlags, TokenizerFlags, fill_config
from megatron.config.train import TrainConfig, TrainFlags, growth_of, iterations
from megatron.config.vocabulary import vocabulary
from megatron.data.config import DataConfig
from megatron.flags.groups import Flags, copied
from megatron.model.config import ModelConfig
from megatron.model.distribution import LayerDistribution
from megatron.optimizer.config import OptimizerConfig
from megatron.parallel.context import ContextExchange
from megatron.parallel.grid import Grid
from megatron.parallel.nccl import BlockLimits
from megatron.parallel.placement import Placement
from megatron.schedules.slice_lengths import SliceStrategy
from megatron.schedules.treatments import TREATMENTS
from megatron.simulator.costs.collective_time import Links
from megatron.simulator.costs.gpus import Gpu


@dataclass(frozen=True)
class ParallelConfig:
    """How the model is laid out over the ranks of the job.

    A field that is not listed here has the meaning of the flag of its name.

    Attributes:
        pipeline_size: pipeline ranks p.
        vocab_parallel: treatment of the vocabulary layers, a name of ``TREATMENTS``.
        pipeline_schedule: schedule of the passes, a name of ``TRAINABLE_SCHEDULES``.
        padded_vocab_size: rows of the whole vocabulary matrix, a multiple of ``vocab_shards``.
        device: kind of device that every rank computes on.
        backend: communication library of the process groups.
        timeout_minutes: minutes that a collective may wait before the job ends.
        virtual_stages: model chunks of a rank, for a schedule of ``CHUNKED_SCHEDULES``;
            ``None``: as few as the schedule needs.
        layers: how transformer layers are spread over the stages.
        memory_limit: the most microbatches that a rank may have in flight.
        recompute_ahead: with layers that are computed again in passes of their own (R), the most
            chunks that a rank may hold between R and B; ``None``: B computes layers again.
        replicas: data parallelism.
        search_seconds: seconds to search for a plan; ``None``: no limit. With a limit the plan
            depends on the machine's speed, so all ranks take the plan of rank 0.
        tensor_size: tensor-parallel ranks t.
        sequence_parallel: whether each tensor-parallel rank has its own part of the sequence
            outside of attention and MLP.
        context_size: context-parallel ranks c, which share every sequence.
        context_exchange: how attention sees the tokens of all of these ranks.
        context_heads_size: in two levels, adjacent context-parallel ranks that exchange heads.
        numa_binding: let ranks run only on CPUs that are close to their GPUs.
        experts: the ranks that have the experts of a layer.
        deep_ep_multiprocessors: of a GPU, that move tokens by the package DeepEP.
        nccl_blocks: thread blocks that NCCL may use.
        ranks_per_machine: ranks of the job in each machine; ``None``: one machine has all ranks.
        gpu: kind of every rank's GPU. ``None``: the kind is not known. Plans are then made by
            FLOPs, and communication takes no time in them.
        links: links between the GPUs. ``None``: the links that GPUs of this kind usually have.
        offloaded: chunks of a rank, or more than it has, whose activations wait on the host.
            ``None``: as the plan says, if it comes from a file; otherwise 0.
        host_bandwidth: bytes/s in one direction between a GPU and its host. ``None``: as usual for
            GPUs of this kind.
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
    context_exchange: ContextExchange = "all_gather"
    context_heads_size: int = 1
    num_seq_splits: int = 1
    seq_split_strategy: SliceStrategy = "uniform"
    experts: ExpertRanks = field(default_factory=ExpertRanks)
    deep_ep_multiprocessors: int = 20
    nccl_blocks: BlockLimits = field(default_factory=BlockLimits)
    ranks_per_machine: int | None = None
    numa_binding: bool = False
    gpu: Gpu | None = None
    links: Links | None = None
    offloaded: int | None = None
    host_bandwidth: float | None = None

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
            self.experts.size,
            self.experts.tensor_size,
            self.context_heads_size,
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
        return Placement(self.grid, self.ranks_per_machine or self.grid.world_size)

    @property
    def vocab_shards(self) -> int:
        """Parts of the vocabulary matrix: p x t, or t if the pipeline does not split it."""
        sharded = TREATMENTS[self.vocab_parallel].is_sharded
        return self.tensor_size * (self.pipeline_size if sharded else 1)


def parallel_config(flags: Flags, vocab_size: int, replicas: int) -> ParallelConfig:
    """Return the layout.

    The vocabulary is padded, so that every shard has equally many rows, a multiple of
    --make-vocab-size-divisible-by.
    """
    parallel, cuda, own_gpu = flags[ParallelFlags], on_cuda(flags), known_gpu(flags)
    treatment = treatment_of(flags)
    layout = copied(
        ParallelConfig,
        flags[PipelineFlags],
        pipeline_size=parallel.pipeline_model_parallel_size,
        tensor_size=parallel.tensor_model_parallel_size,
        sequence_parallel=parallel.sequence_parallel and parallel.tensor_model_parallel_size > 1,
        context_size=parallel.context_parallel_size,
        context_exchange=first_exchange(flags),
        context_heads_size=adjacent_heads(parallel),
        num_seq_splits=flags[SliceFlags].num_seq_splits,
        seq_split_strategy=strategy_of(flags),
        experts=expert_ranks(flags),
        deep_ep_multiprocessors=flags[DeepEPFlags].moe_deepep_num_sms,
        vocab_parallel=treatment,
        pipeline_schedule=schedule_of(flags),
        padded_vocab_size=vocab_size,
        device="cuda" if cuda else "cpu",
        backend="nccl" if cuda else "gloo",
        timeout_minutes=parallel.distributed_timeout_minutes,
        virtual_stages=None if leaves_one_chunk(flags) else chunks_of(flags),
        layers=distribution_of(flags, treatment),
        memory_limit=flags[PipelineFlags].zero_bubble_max_pending_backward,
        recompute_ahead=flags[RecomputeFlags].recompute_ahead,
        offloaded=offloaded_chunks(flags),
        host_bandwidth=host_bandwidth(flags),
        replicas=replica_config(flags, replicas),
        ranks_per_machine=ranks_of_machine(flags[ClusterFlags], dry_run=flags[LogFlags].dry_run),
        numa_binding=cuda and not flags[ClusterFlags].no_numa_binding,
        nccl_blocks=block_limits(flags[ClusterFlags]),
        gpu=own_gpu,
        links=None if own_gpu is None else links_of(flags[ClusterFlags], own_gpu),
    )
    multiple = parallel.make_vocab_size_divisible_by * layout.vocab_shards
    return replace(layout, padded_vocab_size=-(-vocab_size // multiple) * multiple)


class Alternative(NamedTuple):
    """One of the ways that a run could go if ``auto`` leaves something to its plan.

    Attributes:
        words: the flags that name what is chosen, one for each dimension.
        changes: the dimensions with another choice than the first, of those that FLOPs alone
            cannot compare.
        parallel: its layout.
        train: its training.
        notes: sentences for the log, about flags that change nothing in it.
    """

    words: tuple[str, ...]
    changes: int
    parallel: ParallelConfig
    train: TrainConfig
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides a run.

    Attributes:
        notes: sentences for the log, about accepted flags that change nothing here.
        dry_run: the prediction to make instead of training; ``None``: train.
        alternatives: all ways that the run could go, of which the plan takes the best. ``parallel``
            and ``train`` are those of the first. Empty: everything is decided.
        taken: the words of the alternative that the plan has taken.
        could_slice: ways of cutting microbatches that go with the run, for advice.
        could_offload: whether activations could wait on the host, for advice.
        context_choices: exchanges of context-parallel ranks; the one with the fastest passes is
            taken. Empty: the exchange is decided.
    """

    model: ModelConfig
    parallel: ParallelConfig
    train: TrainConfig
    optimizer: OptimizerConfig
    data: DataConfig
    log: LogConfig
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    notes: tuple[str, ...] = ()
    dry_run: DryRun | None = None
    alternatives: tuple[Alternative, ...] = ()
    taken: tuple[str, ...] = ()
    could_slice: tuple[SlicesChoice, ...] = ()
    could_offload: bool = False
    context_choices: tuple[ContextChoice, ...] = ()

    def taking(self, own: Alternative) -> "RunConfig":
        """Return the run with one of its alternatives."""
        return replace(
            self,
            parallel=own.parallel,
            train=own.train,
            taken=own.words,
            alternatives=(),
            notes=(*self.notes, *(note for note in own.notes if note not in self.notes)),
        )


def resolve(flags: Flags, notes: tuple[str, ...] = ()) -> RunConfig:
    """Turn flags without a mistake into the configuration of a run, with all values derived."""
    vocab_size, eod_token = vocabulary(flags)
    replicas, several = number_of_replicas(flags), ways(flags)
    alternatives = tuple(
        Alternative(
            way.words,
            way.changes,
            parallel_config(way.flags, vocab_size, replicas),
            train_config(way.flags, replicas),
            tuple(note for rule in GRAPH_NOTES for note in rule(way.flags)),
        )
        for way in several
    )
    notes, flags = (*notes, *closed_notes(flags)), several[0].flags
    train = flags[TrainFlags]
    return RunConfig(
        model=model_config(flags, vocab_size),
        parallel=alternatives[0].parallel,
        train=alternatives[0].train,
        alternatives=alternatives if len(alternatives) > 1 else (),
        checkpoint=checkpoint_config(flags[CheckpointFlags], train.skip_train, upcycling_of(flags)),
        guard=guard_config(flags[GuardFlags], flags[ParallelFlags].distributed_timeout_minutes),
        optimizer=optimizer_config(flags),
        data=copied(
            DataConfig,
            flags[DataFlags],
            data_path=() if gives_splits(flags[CorpusFlags]) else shared_blend(flags),
            own_paths=own_paths(flags),
            named_by=flags_of_corpora(flags),
            full_validation=flags[CorpusFlags].full_validation,
            reset_attention_mask=flags[CorpusFlags].reset_attention_mask,
            reset_position_ids=flags[CorpusFlags].reset_position_ids,
            prefetch=reads_ahead(flags),
            split=parse_split(flags[DataFlags].split),
            seq_length=flags[ModelFlags].seq_length,
            seed=train.seed,
            eod_token=eod_token,
            added_entries=max(0, vocab_size - (flags[TokenizerFlags].vocab_size or vocab_size)),
            cache_path=flags[DataFlags].data_cache_path,
            fill=fill_config(flags[FillFlags], flags[TokenizerFlags]),
        ),
        log=log_config(
            flags[LogFlags],
            record_config(flags[RecordFlags], flags[CheckpointFlags].save, train.skip_train),
        ),
        notes=notes,
        dry_run=dry_run_config(flags[LogFlags]) if flags[LogFlags].dry_run else None,
        could_slice=possible_slices(flags),
        could_offload=could_offload(flags),
        context_choices=context_choices(flags, SLICE_RULES),
    )


def train_config(given: Flags, replicas: int) -> TrainConfig:
    """Return length, batches and precision of a run. Only a set with documents is evaluated."""
    flags, sets = given[TrainFlags], sets_to_evaluate(given)
    length = iterations(flags)
    evaluates = flags.eval_iters > 0 and (flags.eval_interval is not None or flags.skip_train)
    between = evaluates and "validation" in sets and not flags.skip_train
    return copied(
        TrainConfig,
        flags,
        global_batch_size=length.batch,
        train_iters=length.total,
        dtype=activation_dtype(given),
        gradient_dtype=gradient_dtype(given[PrecisionFlags]),
        fp32_precision=given[PrecisionFlags].fp32_matmul_precision,
        wide_stream=(
            given[PrecisionFlags].fp32_residual_connection
            and activation_dtype(given) != torch.float32
        ),
        eval_interval=flags.eval_interval if between else None,
        final_sets=sets if evaluates else (),
        full_validation=given[CorpusFlags].full_validation,
        replicas=replicas,
        rampup=growth_of(flags),
        length=flags.train_samples,
        vocab_recompute=given[ParallelFlags].vocab_recompute,
        recomputation=recomputation_of(given[RecomputeFlags]),
        captures_passes=captures_passes(given),
        eight_bits=eight_bit_config(given[EightBitFlags], by_engine=engine_multiplies(given)),
        grouped_package=grouped_package(given),
        host_states=host_states(given),
    )
