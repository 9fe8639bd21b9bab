"""A whole run as frozen data, made from the flags once, at the entrypoint.

All defaults are resolved except the peak speed of the device, which is measured later. Code below
the entrypoint sees no flags. The configurations here join several topics.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from megatron.checkpoint.settings import CheckpointSettings
from megatron.data.settings import CorpusSettings, DataSettings, DocumentSettings, FillSettings
from megatron.data.tokenizers.settings import TokenizerSettings
from megatron.flags.groups import Flags
from megatron.layers.recompute_settings import RecomputeSettings
from megatron.model.settings import ModelSettings, ShapeSettings
from megatron.optimizer.settings import OptimizerSettings
from megatron.run.checkpoint import checkpoints_of
from megatron.run.corpora import corpora_of, sets_to_evaluate
from megatron.run.dry_run import DryRunSettings
from megatron.run.eight_bits import eight_bits_of
from megatron.run.experts import upcycling_of
from megatron.run.generate import GenerateSettings
from megatron.run.graphs import captures_passes, could_capture
from megatron.run.grouped_products import grouped_package
from megatron.run.guard import GuardSettings
from megatron.run.log import LogSettings
from megatron.run.model import model_of
from megatron.run.offload_states import host_states
from megatron.run.optimizer_kind import optimizer_config
from megatron.run.own_memory import OwnMemory
from megatron.run.parallel_config import ParallelConfig, parallel_config
from megatron.run.parallelism import (
    number_of_replicas,
    on_cuda,
)
from megatron.run.precision import PrecisionSettings
from megatron.run.records import RecordSettings
from megatron.run.train import (
    EVALUATION,
    TrainSettings,
    evaluation_batches,
    growth_of,
    iterations,
)
from megatron.run.vocabulary import vocabulary
from megatron.simulator.costs.gpus import Gpu


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides a run.

    Attributes:
        notes: sentences for the log, about accepted flags that change nothing here.
        dry_run: the prediction to make instead of training; ``None``: train.
        given: the words behind each flag of the run's command line, without the word ``auto`` of
            dimensions that are decided. Empty: the run has no command line.
        world_size: ranks of the job.
        alternatives: all ways that the run could go, each decided, of which the plan takes the
            best. The rest of the run is that of the first. Empty: everything is decided.
        taken: the words of the alternative that this run is, one for each dimension that the
            command line has left open.
        changes: number of dimensions that FLOPs alone cannot compare, and in which an alternative
            is not the first choice.
    """

    model: ModelSettings
    parallel: ParallelConfig
    train: TrainSettings
    optimizer: OptimizerSettings
    data: DataSettings
    log: LogSettings
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    guard: GuardSettings = field(default_factory=GuardSettings)
    notes: tuple[str, ...] = ()
    dry_run: DryRunSettings | None = None
    given: Mapping[str, tuple[str, ...]] = field(default_factory=dict, repr=False, compare=False)
    world_size: int = field(default=1, repr=False, compare=False)
    alternatives: tuple["RunConfig", ...] = ()
    taken: tuple[str, ...] = ()
    changes: int = 0

    def on(self, gpu: Gpu | None) -> "RunConfig":
        """Return the run, with all its alternatives, on a GPU by whose seconds plans compare."""
        return replace(
            self,
            parallel=replace(self.parallel, gpu=gpu),
            alternatives=tuple(own.on(gpu) for own in self.alternatives),
        )

    def for_memory(self, memory: OwnMemory) -> "RunConfig":
        """Return the run, with all its alternatives, planned for ranks with this memory.

        A known GPU may be one of those that are sold with several sizes of memory.
        """
        gpu = self.parallel.gpu
        if gpu is not None and memory.bytes < gpu.memory:
            gpu = replace(gpu, memory=memory.bytes)
        return replace(
            self,
            parallel=replace(self.parallel, memory=memory, gpu=gpu),
            alternatives=tuple(own.for_memory(memory) for own in self.alternatives),
        )

    def ahead_stage(self, stages: int) -> int | None:
        """Return the stage that predicts further tokens, of ``stages``; ``None``: none does."""
        if not self.model.further.mtp_num_layers:
            return None
        named = self.parallel.layers.further_stage
        return stages - 1 if named is None else named

    def taking(self, own: "RunConfig") -> "RunConfig":
        """Return one of the run's alternatives, with the notes on both."""
        more = (note for note in own.notes if note not in self.notes)
        return replace(own, notes=(*self.notes, *more))


def resolve(flags: Flags, notes: tuple[str, ...] = ()) -> RunConfig:
    """Turn flags without a mistake into the configuration of a run, with all values derived.

    No flag leaves anything to the run's plan but its schedule (``command_line.run_of``).
    """
    vocab_size, eod_token = vocabulary(flags)
    replicas, train = number_of_replicas(flags), flags[TrainSettings]
    return RunConfig(
        model=model_of(flags, vocab_size),
        parallel=parallel_config(flags, vocab_size, replicas),
        train=train_settings(flags, replicas),
        checkpoint=checkpoints_of(flags, upcycling_of(flags)),
        guard=flags[GuardSettings],
        optimizer=optimizer_config(flags),
        data=data_settings(flags, vocab_size, eod_token),
        log=replace(
            flags[LogSettings],
            records=flags[RecordSettings].beside(flags[CheckpointSettings].save, train.skip_train),
            generate=flags[GenerateSettings],
        ),
        notes=notes,
        dry_run=flags[DryRunSettings] if flags[DryRunSettings].dry_run else None,
        given={option: tuple(words) for option, words in flags.given.items()},
        world_size=flags.world_size,
    )


def data_settings(flags: Flags, vocab_size: int, eod_token: int) -> DataSettings:
    """Return the samples of a run, with their corpora, their tokenizer and all derived values.

    Args:
        flags: all flags.
        vocab_size: entries of the vocabulary.
        eod_token: id of the token that ends a document.
    """
    own, tokenizer, named = flags[DataSettings], flags[TokenizerSettings], corpora_of(flags)
    return replace(
        own,
        seq_length=flags[ShapeSettings].seq_length,
        seed=flags[TrainSettings].seed,
        blend=() if flags[CorpusSettings].gives_splits else named.blend(),
        own_paths=named.own_paths(),
        named_by=named.by_flag(),
        added_entries=max(0, vocab_size - (tokenizer.vocab_size or vocab_size)),
        prefetch=own.reads_ahead(on_gpus=on_cuda(flags)),
        resets=replace(flags[DocumentSettings], eod_token=eod_token),
        tokenizer=tokenizer,
        fill=flags[FillSettings],
    )


def train_settings(flags: Flags, replicas: int) -> TrainSettings:
    """Return length, batches and precision of a run. Only a set with documents is evaluated."""
    own, sets = flags[TrainSettings], sets_to_evaluate(flags)
    length = iterations(own)
    evaluates = evaluation_batches(own) > 0
    between = evaluates and "validation" in sets and not own.skip_train
    return replace(
        own,
        global_batch_size=length.batch,
        train_iters=length.total,
        eval_interval=own.eval_interval if between else None,
        eval_iters=EVALUATION if own.eval_iters is None else own.eval_iters,
        replicas=replicas,
        rampup=growth_of(own),
        rampup_batch_size=(),  # the growth stands for its words
        batch_size_steps=(),
        final_sets=sets if evaluates else (),
        precision=flags[PrecisionSettings],
        recomputation=flags[RecomputeSettings].recomputation,
        captures_passes=captures_passes(flags),
        could_capture=could_capture(flags),
        eight_bits=eight_bits_of(flags),
        grouped_package=grouped_package(flags),
        host_states=host_states(flags),
    )
