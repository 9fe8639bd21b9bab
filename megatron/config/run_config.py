"""A whole run as frozen data, made from the flags once, at the entrypoint.

All defaults are resolved except the peak speed of the device, which is measured later. Nothing
below the entrypoint sees a flag. The narrow configurations of the layers below are reused as they
are.
"""

from dataclasses import dataclass, field, replace

import torch

from megatron.checkpoint.config import CheckpointConfig
from megatron.config.checkpoint import CheckpointFlags, checkpoint_config
from megatron.config.corpora import (
    flags_of_corpora,
    gives_splits,
    own_paths,
    reads_ahead,
    sets_to_evaluate,
    shared_blend,
)
from megatron.config.data import CorpusFlags, DataFlags, parse_split
from megatron.config.eight_bits import EightBitFlags, eight_bit_config, engine_multiplies
from megatron.config.groups import Flags, copied
from megatron.config.guard import GuardConfig, GuardFlags, guard_config
from megatron.config.layers import model_config
from megatron.config.layout import ParallelConfig, parallel_config
from megatron.config.log import DryRun, LogConfig, LogFlags, dry_run_config, log_config
from megatron.config.model import ModelFlags
from megatron.config.optimizer_kind import optimizer_config
from megatron.config.parallelism import ParallelFlags, number_of_replicas
from megatron.config.precision import PrecisionFlags, activation_dtype, gradient_dtype
from megatron.config.recompute import RecomputeFlags, recomputation_of
from megatron.config.records import RecordFlags, record_config
from megatron.config.schedule import treatments_of
from megatron.config.tokenizer import FillFlags, TokenizerFlags, fill_config
from megatron.config.train import TrainConfig, TrainFlags, growth_of, iterations
from megatron.config.vocabulary import vocabulary
from megatron.data.config import DataConfig
from megatron.model.config import ModelConfig
from megatron.optimizer.config import OptimizerConfig


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides a run.

    Attributes:
        model: shape and mathematics of the model.
        parallel: layout over the ranks.
        train: length, batch and precision.
        optimizer: AdamW, clipping and learning rate.
        data: corpus and sampling.
        log: printed lines, traces.
        checkpoint: saving and loading.
        guard: what happens when something goes wrong, or the time is over.
        notes: sentences about accepted flags that change nothing here, for the log.
        dry_run: what to predict instead of training; ``None``: train.
        alternatives: layouts with other treatments of the vocabulary, of which the plan takes the
            best; ``parallel`` is the first of them. Empty: the treatment is decided.
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
    alternatives: tuple[ParallelConfig, ...] = ()

    def with_treatment(self, name: str) -> "RunConfig":
        """Return the run with a treatment of the vocabulary that is among the alternatives."""
        if not self.alternatives:
            assert name == self.parallel.vocab_parallel, f"{name} is not an alternative"
            return self
        parallel = next(own for own in self.alternatives if own.vocab_parallel == name)
        return replace(self, parallel=parallel, alternatives=())


def resolve(flags: Flags, notes: tuple[str, ...] = ()) -> RunConfig:
    """Turn flags without a mistake into the configuration of a run.

    Args:
        flags: as given.
        notes: carried over for the log.

    Returns:
        The configuration; nothing in it is left to derive.
    """
    vocab_size, eod_token = vocabulary(flags)
    replicas, train = number_of_replicas(flags), flags[TrainFlags]
    layouts = tuple(
        parallel_config(flags, vocab_size, replicas, treatment)
        for treatment in treatments_of(flags)
    )
    return RunConfig(
        model=model_config(flags, vocab_size),
        parallel=layouts[0],
        alternatives=layouts if len(layouts) > 1 else (),
        train=train_config(flags, replicas),
        checkpoint=checkpoint_config(flags[CheckpointFlags], train.skip_train),
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
    )


def train_config(given: Flags, replicas: int) -> TrainConfig:
    """Length, batches and precision; only a set with documents is evaluated."""
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
        eight_bits=eight_bit_config(given[EightBitFlags], by_engine=engine_multiplies(given)),
    )
