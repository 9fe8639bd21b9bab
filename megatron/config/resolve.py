"""Turns checked flags into configurations; decides every default that depends on another value.

A field with the same name as a flag is copied by itself.
"""

from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from megatron.checkpoint.config import CheckpointConfig
from megatron.config.data_flags import (
    evaluation_sets,
    parse_data_path,
    parse_rampup,
    parse_size_steps,
    parse_split,
)
from megatron.config.flags import (
    DRY_RUN_GPU,
    SCHEDULE_PROFILE_ITERATIONS,
    DataFlags,
    Flags,
    LogFlags,
    ParallelFlags,
    TrainFlags,
)
from megatron.config.guard_flags import parse_iterations
from megatron.config.layer_fields import layer_fields
from megatron.config.long_run_flags import CheckpointFlags, GuardFlags, ReplicaFlags
from megatron.config.optimizer_flags import OptimizerFlags
from megatron.config.pipeline_flags import settle_pipeline
from megatron.config.precision_flags import PrecisionFlags
from megatron.config.recompute_flags import recomputation_of
from megatron.config.record_flags import RecordFlags
from megatron.config.run_config import (
    DryRun,
    GuardConfig,
    LogConfig,
    ParallelConfig,
    RecordConfig,
    ReplicaConfig,
    RunConfig,
    TrainConfig,
)
from megatron.data.batch_sizes import BatchSizes, Growth
from megatron.data.config import DataConfig
from megatron.data.tokenizer import build_tokenizer
from megatron.model.config import ModelConfig
from megatron.optimizer.config import LossScaleConfig, MuonConfig, OptimizerConfig

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Config = TypeVar("Config", bound=DataclassInstance)


def resolve(flags: Flags, notes: tuple[str, ...] = (), world_size: int = 1) -> RunConfig:
    """Turn flags without a mistake into the configuration of a run.

    Args:
        flags: as given.
        notes: carried over for the log.
        world_size: ranks of the job.

    Returns:
        The configuration; nothing in it is left to derive.
    """
    vocab_size, eod_token = vocabulary(flags.data, flags.log.dry_run)
    replicas = number_of_replicas(flags, world_size)
    return RunConfig(
        model=model_config(flags, vocab_size),
        parallel=parallel_config(flags, vocab_size, replicas),
        train=train_config(flags, replicas),
        checkpoint=checkpoint_config(flags.checkpoint, flags.train.skip_train),
        guard=guard_config(flags.guard, flags.parallel.distributed_timeout_minutes),
        optimizer=optimizer_config(flags),
        data=copied(
            DataConfig,
            flags.data,
            data_path=parse_data_path(flags.data.data_path),
            split=parse_split(flags.data.split),
            seq_length=flags.model.seq_length,
            seed=flags.train.seed,
            eod_token=eod_token,
            added_entries=max(0, vocab_size - (flags.data.vocab_size or vocab_size)),
            cache_path=flags.data.data_cache_path,
        ),
        log=log_config(flags),
        notes=notes,
        dry_run=dry_run_config(flags.log) if flags.log.dry_run else None,
    )


def number_of_replicas(flags: Flags, world_size: int) -> int:
    """Return how many replicas the job's ranks make; a dry run, which needs none, may name them."""
    named = flags.log.dry_run_replicas if flags.log.dry_run else None
    return named or max(1, world_size // ranks_of_replica(flags.parallel))


def ranks_of_replica(flags: ParallelFlags) -> int:
    """Return how many ranks share one copy of the model, p x t."""
    return flags.pipeline_model_parallel_size * flags.tensor_model_parallel_size


def dry_run_config(flags: LogFlags) -> DryRun:
    """What to predict for."""
    bandwidth, latency = flags.dry_run_replica_bandwidth, flags.dry_run_replica_latency
    return DryRun(
        flags.dry_run_gpu or DRY_RUN_GPU,
        None if bandwidth is None else 1e9 * bandwidth,
        None if latency is None else 1e-6 * latency,
    )


def replica_config(flags: ReplicaFlags, replicas: int) -> ReplicaConfig:
    """Data parallelism; all its flags change nothing for one replica."""
    if replicas == 1:
        return ReplicaConfig()
    return ReplicaConfig(
        size=replicas,
        overlap=flags.overlap_grad_reduce,
        bucket_size=flags.ddp_bucket_size,
        buckets=flags.ddp_num_buckets,
        reduce_dtype=torch.bfloat16 if flags.grad_reduce_in_bf16 else None,
        shard_optimizer=flags.use_distributed_optimizer,
        overlap_gather=flags.overlap_param_gather,
        order="tp-pp-dp" if flags.use_tp_pp_dp_mapping else "tp-dp-pp",
    )


def checkpoint_config(flags: CheckpointFlags, skip_train: bool) -> CheckpointConfig:
    """What is saved, and what is loaded; without training only weights, which must be there."""
    return copied(
        CheckpointConfig,
        flags,
        save=None if skip_train else flags.save,
        save_optimizer=not flags.no_save_optim,
        asynchronous=flags.async_save,
        load_step=flags.ckpt_step,
        load_optimizer=not flags.no_load_optim and not skip_train,
        must_load=flags.exit_on_missing_checkpoint or skip_train,
    )


def guard_config(flags: GuardFlags, timeout_minutes: int) -> GuardConfig:
    """What a long run does when something goes wrong, or its time is over."""
    names = sorted({"SIGTERM", "SIGUSR1", flags.exit_signal})
    minutes = flags.exit_duration_in_mins
    return GuardConfig(
        exit_signals=tuple(names) if flags.exit_signal_handler else (),
        exit_seconds=None if minutes is None else 60 * minutes,
        exit_file=flags.kill_switch_path,
        trigger_folder=flags.trigger_path,
        ends_if_not_finite=not flags.no_check_for_nan_in_loss_and_grad,
        tells_spikes=flags.check_for_spiky_loss,
        skipped=parse_iterations(flags.iterations_to_skip),
        hang_seconds=flags.hang_seconds or 30 * timeout_minutes,
        tells_stragglers=flags.log_straggler,
    )


def copied(config: "type[Config]", group: "DataclassInstance", **derived: Any) -> "Config":
    """Make a configuration of a group of flags.

    Args:
        config: its class.
        group: its flags become the fields of the same name.
        derived: the other fields.
    """
    names = {field.name for field in fields(config)}
    same = {f.name: getattr(group, f.name) for f in fields(group) if f.name in names}
    left = names - same.keys() - derived.keys()
    assert not left, f"no flag and no derivation for {sorted(left)} of {config.__name__}"
    return config(**(same | derived))


def vocabulary(flags: DataFlags, dry_run: bool) -> tuple[int, int]:
    """Return the vocabulary's size and the token that ends a document.

    Raises:
        ValueError: the tokenizer is unknown, its file cannot be used, or --vocab-size does not fit.
    """
    kind = flags.tokenizer_type or ("NullTokenizer" if flags.mock_data else None)
    if kind is None or (dry_run and flags.vocab_size):
        return flags.vocab_size or 0, 0  # without the tokenizer's file, which may not be here
    tokenizer = build_tokenizer(kind, flags.tokenizer_model, flags.vocab_size)
    # --vocab-size may add entries to a tokenizer's own; build_tokenizer refuses fewer.
    return max(tokenizer.vocab_size, flags.vocab_size or 0), tokenizer.eod


def model_config(flags: Flags, vocab_size: int) -> ModelConfig:
    """The model's shape; MLP width, key/value heads and head width as Megatron derives them."""
    model, layers = flags.model, flags.layers
    heads, hidden = model.num_attention_heads, model.hidden_size
    gated = model.swiglu or layers.geglu
    ffn_default = int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden
    return copied(
        ModelConfig,
        model,
        ffn_hidden_size=model.ffn_hidden_size or ffn_default,
        num_query_groups=(model.num_query_groups or 1) if model.group_query_attention else heads,
        kv_channels=model.kv_channels or hidden // heads,
        max_position_embeddings=model.max_position_embeddings or model.seq_length,
        vocab_size=vocab_size,
        add_bias_linear=not model.disable_bias_linear,
        tie_embeddings=not model.untie_embeddings_and_output_weights,
        **layer_fields(flags),
    )


def parallel_config(flags: Flags, vocab_size: int, replicas: int) -> ParallelConfig:
    """The layout; the vocabulary is padded so that every shard has the same, round, size."""
    parallel, pipeline = flags.parallel, settle_pipeline(flags)
    on_cuda = parallel.device != "cpu" and torch.cuda.is_available()
    layout = copied(
        ParallelConfig,
        flags.pipeline,
        pipeline_size=parallel.pipeline_model_parallel_size,
        tensor_size=parallel.tensor_model_parallel_size,
        sequence_parallel=parallel.sequence_parallel and parallel.tensor_model_parallel_size > 1,
        vocab_parallel=pipeline.treatment,
        pipeline_schedule=pipeline.schedule,
        padded_vocab_size=vocab_size,
        device="cuda" if on_cuda else "cpu",
        backend="nccl" if on_cuda else "gloo",
        timeout_minutes=parallel.distributed_timeout_minutes,
        virtual_stages=pipeline.virtual_stages,
        layers=pipeline.layers,
        memory_limit=flags.pipeline.zero_bubble_max_pending_backward,
        recompute_ahead=flags.recompute.recompute_ahead,
        replicas=replica_config(flags.replicas, replicas),
    )
    multiple = parallel.make_vocab_size_divisible_by * layout.vocab_shards
    return replace(layout, padded_vocab_size=-(-vocab_size // multiple) * multiple)


class Iterations(NamedTuple):
    """How long a run is.

    Attributes:
        batch: samples of an iteration, once batches grow no more.
        total: iterations of the whole job; 0 where no length is given.
        last: the last iteration that runs now.
        samples: of all iterations of the job.
    """

    batch: int
    total: int
    last: int
    samples: int


def iterations(flags: TrainFlags) -> Iterations:
    """The run's length; samples are rounded down to whole iterations."""
    batch = flags.global_batch_size or flags.micro_batch_size
    try:
        sizes = BatchSizes(batch, growth_of(flags))
    except ValueError:  # a rule tells it
        sizes = BatchSizes(batch)
    total = flags.train_iters or sizes.iterations(flags.train_samples or 0)
    last = min(total, flags.exit_interval or total)
    return Iterations(batch, total, last, sizes.samples_of(total))


def growth_of(flags: TrainFlags) -> Growth | None:
    """Return how batches grow; ``None``: they do not. Errors as of ``parse_rampup``."""
    unit = flags.micro_batch_size
    batch = flags.global_batch_size or unit
    rampup = parse_rampup(flags.rampup_batch_size, batch, unit)
    return rampup or parse_size_steps(flags.batch_size_steps, batch, unit)


def train_config(given: Flags, replicas: int) -> TrainConfig:
    """Length, batches and precision; only a set with documents is evaluated."""
    flags, sets = given.train, evaluation_sets(given.data.split)
    length = iterations(flags)
    evaluates = flags.eval_iters > 0 and (flags.eval_interval is not None or flags.skip_train)
    between = evaluates and "validation" in sets and not flags.skip_train
    return copied(
        TrainConfig,
        flags,
        global_batch_size=length.batch,
        train_iters=length.total,
        dtype=activation_dtype(given),
        gradient_dtype=gradient_dtype(given.precision),
        wide_stream=(
            given.precision.fp32_residual_connection and activation_dtype(given) != torch.float32
        ),
        eval_interval=flags.eval_interval if between else None,
        final_sets=sets if evaluates else (),
        replicas=replicas,
        rampup=growth_of(flags),
        length=flags.train_samples,
        vocab_recompute=given.parallel.vocab_recompute,
        recomputation=recomputation_of(given.recompute),
    )


def activation_dtype(flags: Flags) -> torch.dtype:
    """The type of parameters and activations."""
    if flags.precision.fp16:
        return torch.float16
    return torch.bfloat16 if flags.train.bf16 else torch.float32


def gradient_dtype(flags: PrecisionFlags) -> torch.dtype:
    """The type in which gradients add up."""
    return torch.bfloat16 if flags.main_grads_dtype == "bf16" else torch.float32


def loss_scale_config(flags: PrecisionFlags) -> LossScaleConfig | None:
    """The loss scale, which only fp16 has."""
    if not flags.fp16:
        return None
    return LossScaleConfig(
        constant=flags.loss_scale,
        initial=flags.initial_loss_scale,
        minimum=flags.min_loss_scale,
        window=flags.loss_scale_window,
        hysteresis=flags.hysteresis,
    )


class Spans(NamedTuple):
    """The spans of the learning rate, in samples.

    Attributes:
        decay: until the final rate is reached, warm-up included.
        warmup: of the warm-up; a share of the decay need not be whole.
        annealing: at the end of the decay in which the rate of WSD falls.
    """

    decay: int
    warmup: float
    annealing: int


def learning_rate_spans(flags: OptimizerFlags, train: TrainFlags) -> Spans:
    """Return the spans of the learning rate, given in iterations or in samples."""
    length = iterations(train)
    batch = length.batch
    decay = flags.lr_decay_samples or (flags.lr_decay_iters or 0) * batch
    decay = decay or train.train_samples or length.samples
    warmup: float = flags.lr_warmup_samples or flags.lr_warmup_iters * batch
    if flags.lr_warmup_fraction:
        warmup = flags.lr_warmup_fraction * decay
    annealing = flags.lr_wsd_decay_samples or (flags.lr_wsd_decay_iters or 0) * batch
    return Spans(decay, warmup, annealing)


def optimizer_config(flags: Flags) -> OptimizerConfig:
    """The optimizer and its rates, their spans in samples."""
    optimizer, train = flags.optimizer, flags.train
    spans = learning_rate_spans(optimizer, train)
    return copied(
        OptimizerConfig,
        optimizer,
        lr_decay_samples=spans.decay,
        lr_warmup_samples=spans.warmup,
        lr_wsd_decay_samples=spans.annealing,
        weight_decay_samples=train.train_samples or iterations(train).samples,
        muon=muon_config(optimizer),
        post_validation=optimizer.enable_optimizer_post_validation,
        loss_scale=loss_scale_config(flags.precision),
        exp_avg_dtype=flags.precision.exp_avg_dtype,
        exp_avg_sq_dtype=flags.precision.exp_avg_sq_dtype,
    )


def muon_config(flags: OptimizerFlags) -> MuonConfig:
    """Muon's settings: its flags without their common beginning."""
    prefix = "muon_"
    same = {
        name.removeprefix(prefix): value
        for name, value in vars(flags).items()
        if name.startswith(prefix) and name != "muon_no_split_qkv"
    }
    return MuonConfig(split_qkv=not flags.muon_no_split_qkv, **same)


def profiled_iterations(flags: LogFlags) -> tuple[int | None, int | None]:
    """The first iteration whose passes are timed, and the first whose passes no longer are."""
    start, end = flags.profile_schedule_start, flags.profile_schedule_end
    if start is not None and end is None:
        end = start + SCHEDULE_PROFILE_ITERATIONS
    return start, end


def log_config(flags: Flags) -> LogConfig:
    """Printed lines, traces, measurements and records."""
    return copied(
        LogConfig,
        flags.log,
        profile_schedule_end=profiled_iterations(flags.log)[1],
        records=record_config(flags.records, flags.checkpoint.save),
    )


def record_config(flags: RecordFlags, save: Path | None) -> RecordConfig:
    """What is recorded; Weights & Biases writes beside the checkpoints, as in Megatron."""
    return copied(
        RecordConfig,
        flags,
        wandb_save_dir=flags.wandb_save_dir or (save / "wandb" if save is not None else None),
        live_display=not flags.no_live_display,
        log_loss_scale_to_tensorboard=not flags.no_log_loss_scale_to_tensorboard,
    )
