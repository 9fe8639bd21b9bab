"""Checked flags to configurations: every default that depends on another value is decided here."""

import dataclasses

import torch

from megatron.config.data_flags import parse_data_path, parse_split
from megatron.config.flags import (
    DataFlags,
    Flags,
    LogFlags,
    ModelFlags,
    OptimizerFlags,
    TrainFlags,
)
from megatron.config.pipeline_flags import Pipeline, settle_pipeline
from megatron.config.run_config import DryRun, LogConfig, ParallelConfig, RunConfig, TrainConfig
from megatron.data.config import DataConfig
from megatron.data.indexed import IndexedDataset
from megatron.data.tokenizer import build_tokenizer
from megatron.model.config import ModelConfig
from megatron.optimizer.config import OptimizerConfig

DRY_RUN_GPU = "A100"
SCHEDULE_PROFILE_ITERATIONS = 3


def resolve(flags: Flags, notes: tuple[str, ...] = ()) -> RunConfig:
    """Turn checked flags into the configuration of a run.

    Reads the tokenizer and opens every data file, so that a broken one is found before any
    process group exists.

    Args:
        flags: as ``check_flags`` let them pass.
        notes: carried over for the log.

    Returns:
        The configuration; nothing in it is left to derive.

    Raises:
        ValueError: the tokenizer, a data file, ``--data-path`` or ``--split`` is no good.
        FileNotFoundError: a data file is missing.
    """
    pipeline = settle_pipeline(flags)
    dry_run = DryRun(flags.log.dry_run_gpu or DRY_RUN_GPU) if flags.log.dry_run else None
    vocab_size, eod = _vocabulary(flags.data, dry_run is not None)
    train = train_config(flags.train)
    return RunConfig(
        model=model_config(flags.model, vocab_size),
        parallel=parallel_config(flags, pipeline, vocab_size),
        train=train,
        optimizer=optimizer_config(flags.optimizer, flags.train, train),
        data=data_config(
            flags.data, flags.model.seq_length, train, eod, must_exist=dry_run is None
        ),
        log=log_config(flags.log, train),
        notes=notes,
        dry_run=dry_run,
    )


def _vocabulary(flags: DataFlags, dry_run: bool) -> tuple[int, int]:
    """Return the vocabulary's size and the token that ends a document."""
    if dry_run and flags.vocab_size:
        return flags.vocab_size, 0  # without the tokenizer's file, which may be on another machine
    tokenizer = build_tokenizer(flags.tokenizer_type, flags.tokenizer_model, flags.vocab_size)
    # --vocab-size may add entries to a tokenizer's own; build_tokenizer refuses fewer.
    return max(tokenizer.vocab_size, flags.vocab_size or 0), tokenizer.eod


def model_config(flags: ModelFlags, vocab_size: int) -> ModelConfig:
    """The model's shape; MLP width, key/value heads and head width as Megatron derives them."""
    ffn_default = (
        int(4 * flags.hidden_size * 2 / 3 / 64) * 64 if flags.swiglu else 4 * flags.hidden_size
    )
    heads = flags.num_attention_heads
    return ModelConfig(
        num_layers=flags.num_layers,
        hidden_size=flags.hidden_size,
        ffn_hidden_size=flags.ffn_hidden_size or ffn_default,
        num_attention_heads=heads,
        num_query_groups=(flags.num_query_groups or 1) if flags.group_query_attention else heads,
        kv_channels=flags.kv_channels or flags.hidden_size // heads,
        seq_length=flags.seq_length,
        max_position_embeddings=flags.max_position_embeddings or flags.seq_length,
        vocab_size=vocab_size,
        position_embedding_type=flags.position_embedding_type,
        rotary_base=flags.rotary_base,
        rotary_percent=flags.rotary_percent,
        normalization=flags.normalization,
        norm_epsilon=flags.norm_epsilon,
        swiglu=flags.swiglu,
        qk_layernorm=flags.qk_layernorm,
        add_bias_linear=not flags.disable_bias_linear,
        tie_embeddings=not flags.untie_embeddings_and_output_weights,
        attention_dropout=flags.attention_dropout,
        hidden_dropout=flags.hidden_dropout,
        init_method_std=flags.init_method_std,
        label_smoothing=flags.label_smoothing,
        z_loss_coeff=flags.z_loss_coeff,
        logit_softcap=flags.logit_softcap,
    )


def parallel_config(flags: Flags, pipeline: Pipeline, vocab_size: int) -> ParallelConfig:
    """The layout; the vocabulary is padded so that every shard has the same, round, size."""
    parallel = flags.parallel
    on_cuda = parallel.device != "cpu" and torch.cuda.is_available()
    layout = ParallelConfig(
        pipeline_size=parallel.pipeline_model_parallel_size,
        vocab_parallel=pipeline.treatment,
        pipeline_schedule=pipeline.schedule,
        padded_vocab_size=vocab_size,
        device="cuda" if on_cuda else "cpu",
        backend=parallel.distributed_backend or ("nccl" if on_cuda else "gloo"),
        timeout_minutes=parallel.distributed_timeout_minutes,
        virtual_stages=pipeline.virtual_stages,
        layers=pipeline.layers,
        schedule_file=flags.pipeline.schedule_file,
        memory_limit=flags.pipeline.zero_bubble_max_pending_backward,
        measured_costs=flags.pipeline.measured_costs,
    )
    multiple = parallel.make_vocab_size_divisible_by * layout.vocab_shards
    padded = -(-vocab_size // multiple) * multiple
    return dataclasses.replace(layout, padded_vocab_size=padded)


def train_config(flags: TrainFlags) -> TrainConfig:
    """Length, batches and precision; samples are rounded down to whole iterations."""
    batch = flags.global_batch_size or flags.micro_batch_size
    iterations = flags.train_iters or (flags.train_samples or 0) // batch
    return TrainConfig(
        micro_batch_size=flags.micro_batch_size,
        global_batch_size=batch,
        train_iters=iterations,
        exit_interval=flags.exit_interval,
        seed=flags.seed,
        dtype=torch.bfloat16 if flags.bf16 else torch.float32,
        eval_interval=flags.eval_interval if flags.eval_iters > 0 else None,
        eval_iters=flags.eval_iters,
    )


def optimizer_config(
    flags: OptimizerFlags, given: TrainFlags, train: TrainConfig
) -> OptimizerConfig:
    """AdamW and the learning rate, its spans in samples.

    Args:
        flags: of the optimizer.
        given: tells whether the run's length was given in samples.
        train: tells the batch size and the length.

    Raises:
        ValueError: the warm-up is not shorter than the decay.
    """
    batch = train.global_batch_size
    decay = flags.lr_decay_samples or (flags.lr_decay_iters or 0) * batch
    decay = decay or given.train_samples or train.train_samples
    warmup = flags.lr_warmup_samples or flags.lr_warmup_iters * batch
    if flags.lr_warmup_fraction:
        warmup = round(flags.lr_warmup_fraction * decay)
    if warmup >= decay:
        raise ValueError(
            f"the warm-up of {warmup} samples (--lr-warmup-iters {flags.lr_warmup_iters}, "
            f"--lr-warmup-samples {flags.lr_warmup_samples}, "
            f"--lr-warmup-fraction {flags.lr_warmup_fraction}) is not shorter than the {decay} "
            f"samples of the decay (--global-batch-size {batch}): shorten it, or lengthen "
            "--lr-decay-iters or --lr-decay-samples"
        )
    return OptimizerConfig(
        lr=flags.lr,
        min_lr=flags.min_lr,
        lr_decay_style=flags.lr_decay_style,
        lr_decay_samples=decay,
        lr_warmup_samples=warmup,
        lr_warmup_init=flags.lr_warmup_init,
        weight_decay=flags.weight_decay,
        adam_beta1=flags.adam_beta1,
        adam_beta2=flags.adam_beta2,
        adam_eps=flags.adam_eps,
        clip_grad=flags.clip_grad,
        post_validation=flags.enable_optimizer_post_validation,
    )


def data_config(
    flags: DataFlags, seq_length: int, train: TrainConfig, eod_token: int, must_exist: bool
) -> DataConfig:
    """The corpus, every file of which has been opened and found whole if it ``must_exist``.

    Raises:
        ValueError: ``--data-path`` or ``--split`` cannot be read, evaluation is asked for without
            a validation share, or a data file is foreign or truncated.
        FileNotFoundError: a data file is missing.
    """
    blend = parse_data_path(flags.data_path) if flags.data_path else ()
    split = parse_split(flags.split)
    if train.eval_interval is not None and split[1] == 0:
        raise ValueError(
            f"--split {flags.split} leaves no documents to validate on, but --eval-interval "
            f"{train.eval_interval} asks for it: give a second share, for example 969,30,1"
        )
    for _, prefix in blend if must_exist else ():
        IndexedDataset(prefix)
    return DataConfig(
        data_path=blend,
        split=split,
        seq_length=seq_length,
        seed=train.seed,
        eod_token=eod_token,
        eod_mask_loss=flags.eod_mask_loss,
        cache_path=flags.data_cache_path,
    )


def log_config(flags: LogFlags, train: TrainConfig) -> LogConfig:
    """Printed lines, traces and measurements.

    Raises:
        ValueError: a trace or a measurement is asked for of iterations that the run does not reach,
            or a new plan after its end.
    """
    last = min(train.train_iters, train.exit_interval or train.train_iters)
    if flags.profile and flags.profile_step_start > last:
        raise ValueError(
            f"--profile-step-start {flags.profile_step_start} is after the last iteration, "
            f"{last}: nothing would be traced; lower it"
        )
    start, end = flags.profile_schedule_start, flags.profile_schedule_end
    if start is not None:
        end = start + SCHEDULE_PROFILE_ITERATIONS if end is None else end
        latest = last if flags.replan else last + 1
        if end > latest:
            raise ValueError(
                f"--profile-schedule-start {start} measures the iterations before {end} "
                "(--profile-schedule-end), "
                + ("and --replan needs one more after them" if flags.replan else "")
                + f", but the last is {last}: lower them"
            )
    return LogConfig(
        log_interval=flags.log_interval,
        peak_tflops=flags.peak_tflops,
        profile=flags.profile,
        profile_step_start=flags.profile_step_start,
        profile_step_end=flags.profile_step_end,
        profile_dir=flags.profile_dir,
        record_timeline=flags.record_timeline,
        profile_schedule_start=start,
        profile_schedule_end=end,
        schedule_costs=flags.schedule_costs,
        replan=flags.replan,
    )
