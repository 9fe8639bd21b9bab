"""Turns checked flags into configurations; decides every default that depends on another value.

A field with the same name as a flag is copied by itself.
"""

import os
import re
from dataclasses import replace
from math import prod
from pathlib import Path

import torch

from megatron.checkpoint.config import CheckpointConfig
from megatron.config.cluster_flags import ClusterFlags, block_limits, links_of, ranks_of_machine
from megatron.config.copied import copied
from megatron.config.corpora import (
    flags_of_corpora,
    gives_splits,
    own_paths,
    sets_to_evaluate,
    shared_blend,
)
from megatron.config.corpus_flags import CorpusFlags
from megatron.config.data_flags import parse_split
from megatron.config.declare import Flags
from megatron.config.eight_bit_flags import EightBitFlags, eight_bit_config
from megatron.config.fill_flags import FillFlags, fill_config
from megatron.config.flags import (
    DRY_RUN_GPU,
    SCHEDULE_PROFILE_ITERATIONS,
    DataFlags,
    LogFlags,
    ModelFlags,
    ParallelFlags,
    PipelineFlags,
    TrainFlags,
)
from megatron.config.guard_flags import parse_iterations
from megatron.config.layer_fields import layer_fields
from megatron.config.layer_flags import LayerFlags
from megatron.config.lengths import growth_of, iterations
from megatron.config.long_run_flags import CheckpointFlags, GuardFlags, ReplicaFlags
from megatron.config.pipeline_asks import treatments_of
from megatron.config.pipeline_flags import settle_pipeline
from megatron.config.precision_flags import PrecisionFlags
from megatron.config.recompute_flags import RecomputeFlags, recomputation_of
from megatron.config.record_flags import RecordFlags
from megatron.config.resolve_optimizer import optimizer_config
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
from megatron.config.tokenizer_flags import TokenizerFlags, tokenizer_config
from megatron.config.transformer_engine import engine_multiplies
from megatron.data.config import DataConfig
from megatron.data.tokenizers.build import build_tokenizer
from megatron.model.config import ModelConfig
from megatron.parallel.grid import Grid, Order
from megatron.parallel.placement import fewest_hops
from megatron.simulator.costs.gpus import GIB, Gpu, gpu, gpu_of_driver


def resolve(flags: Flags, notes: tuple[str, ...] = (), world_size: int = 1) -> RunConfig:
    """Turn flags without a mistake into the configuration of a run.

    Args:
        flags: as given.
        notes: carried over for the log.
        world_size: ranks of the job.

    Returns:
        The configuration; nothing in it is left to derive.
    """
    vocab_size, eod_token = vocabulary(flags)
    replicas = number_of_replicas(flags, world_size)
    layouts = tuple(
        parallel_config(flags, vocab_size, replicas, treatment)
        for treatment in treatments_of(flags)
    )
    return RunConfig(
        model=model_config(flags, vocab_size),
        parallel=layouts[0],
        alternatives=layouts if len(layouts) > 1 else (),
        train=train_config(flags, replicas),
        checkpoint=checkpoint_config(flags[CheckpointFlags], flags[TrainFlags].skip_train),
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
            seed=flags[TrainFlags].seed,
            eod_token=eod_token,
            added_entries=max(0, vocab_size - (flags[TokenizerFlags].vocab_size or vocab_size)),
            cache_path=flags[DataFlags].data_cache_path,
            fill=fill_config(flags[FillFlags], flags[TokenizerFlags]),
        ),
        log=log_config(flags),
        notes=notes,
        dry_run=dry_run_config(flags[LogFlags]) if flags[LogFlags].dry_run else None,
    )


def number_of_replicas(flags: Flags, world_size: int) -> int:
    """Return how many replicas the job's ranks make; a dry run, which needs none, may name them."""
    named = flags[LogFlags].dry_run_replicas if flags[LogFlags].dry_run else None
    return named or max(1, world_size // ranks_of_replica(flags[ParallelFlags]))


def ranks_of_replica(flags: ParallelFlags) -> int:
    """Return how many ranks work on a microbatch together, p x t x c."""
    sizes = flags.pipeline_model_parallel_size, flags.tensor_model_parallel_size
    return prod(sizes) * flags.context_parallel_size


def dry_run_config(flags: LogFlags) -> DryRun:
    """What to predict for."""
    bandwidth, latency = flags.dry_run_replica_bandwidth, flags.dry_run_replica_latency
    return DryRun(
        flags.dry_run_gpu or DRY_RUN_GPU,
        None if bandwidth is None else 1e9 * bandwidth,
        None if latency is None else 1e-6 * latency,
    )


def replica_config(given: Flags, replicas: int) -> ReplicaConfig:
    """Data parallelism; all its flags change nothing where no rank has the parameters of another.

    Args:
        given: all flags.
        replicas: of the model.
    """
    alike = replicas * given[ParallelFlags].context_parallel_size
    if alike == 1:
        return ReplicaConfig()
    flags = given[ReplicaFlags]
    return ReplicaConfig(
        size=alike,
        overlap=flags.overlap_grad_reduce,
        bucket_size=flags.ddp_bucket_size,
        buckets=flags.ddp_num_buckets,
        reduce_dtype=torch.bfloat16 if flags.grad_reduce_in_bf16 else None,
        shard_optimizer=flags.use_distributed_optimizer,
        overlap_gather=flags.overlap_param_gather,
        order=rank_order(given, replicas),
    )


def rank_order(flags: Flags, replicas: int) -> Order:
    """How the ranks are numbered: as asked, else so that pipelines leave machines seldom."""
    if flags[ReplicaFlags].use_tp_pp_dp_mapping:
        return "tp-pp-dp"
    sizes = flags[ParallelFlags]
    grid = Grid(
        sizes.tensor_model_parallel_size,
        replicas,
        sizes.pipeline_model_parallel_size,
        context_size=sizes.context_parallel_size,
    )
    ranks = ranks_of_machine(flags[ClusterFlags], dry_run=flags[LogFlags].dry_run)
    return flags[ClusterFlags].rank_order or fewest_hops(grid, ranks or grid.world_size)


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


def vocabulary(flags: Flags) -> tuple[int, int]:
    """Return the vocabulary's size and the token that ends a document.

    Raises:
        ValueError: the tokenizer is unknown, its file cannot be used, or --vocab-size does not fit.
    """
    given = flags[TokenizerFlags]
    kind = given.tokenizer_type or ("NullTokenizer" if flags[DataFlags].mock_data else None)
    if kind is None or (flags[LogFlags].dry_run and given.vocab_size):
        return given.vocab_size or 0, 0  # without the tokenizer's file, which may not be here
    tokenizer = build_tokenizer(tokenizer_config(given, kind))
    # --vocab-size may add entries to a tokenizer's own; build_tokenizer refuses fewer.
    return max(tokenizer.vocab_size, given.vocab_size or 0), tokenizer.eod


def model_config(flags: Flags, vocab_size: int) -> ModelConfig:
    """The model's shape; MLP width, key/value heads and head width as Megatron derives them."""
    model, layers = flags[ModelFlags], flags[LayerFlags]
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


def reads_ahead(flags: Flags) -> bool:
    """Whether a thread reads the next batch: on GPUs the host has nothing else to do."""
    workers = flags[CorpusFlags].num_workers
    return on_cuda(flags) if workers is None else workers > 0


def on_cuda(flags: Flags) -> bool:
    """Whether the run computes on GPUs."""
    return flags[ParallelFlags].device != "cpu" and torch.cuda.is_available()


def known_gpu(flags: Flags) -> Gpu | None:
    """Return the GPU of a job or a dry run; ``None`` if there is none, or nothing is known of it.

    A rank asks only for the name of its own GPU, which is the same on all ranks.
    """
    if flags[LogFlags].dry_run:
        return gpu(flags[LogFlags].dry_run_gpu or DRY_RUN_GPU)
    if not on_cuda(flags):
        return None
    index = int(os.environ.get("LOCAL_RANK") or 0)
    return gpu_with_memory(torch.cuda.get_device_name(index))


def gpu_with_memory(name: str) -> Gpu | None:
    """Return the GPU that the driver calls ``name``, with the memory that the name tells."""
    found, told = gpu_of_driver(name), re.search(r"(\d+) ?GB\b", name)
    if found is None or told is None:
        return found
    return replace(found, memory=min(found.memory, int(told[1]) * GIB))


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


def activation_dtype(flags: Flags) -> torch.dtype:
    """The type of parameters and activations."""
    if flags[PrecisionFlags].fp16:
        return torch.float16
    return torch.bfloat16 if flags[TrainFlags].bf16 else torch.float32


def gradient_dtype(flags: PrecisionFlags) -> torch.dtype:
    """The type in which gradients add up."""
    return torch.bfloat16 if flags.main_grads_dtype == "bf16" else torch.float32


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
        flags[LogFlags],
        profile_schedule_end=profiled_iterations(flags[LogFlags])[1],
        records=record_config(
            flags[RecordFlags], flags[CheckpointFlags].save, flags[TrainFlags].skip_train
        ),
    )


def record_config(flags: RecordFlags, save: Path | None, skip_train: bool) -> RecordConfig:
    """What is recorded; Weights & Biases writes beside the checkpoints, as in Megatron."""
    return copied(
        RecordConfig,
        flags,
        wandb_save_dir=flags.wandb_save_dir or (save / "wandb" if save is not None else None),
        progress_folder=save if flags.log_progress and not skip_train else None,
        live_display=not flags.no_live_display,
        log_loss_scale_to_tensorboard=not flags.no_log_loss_scale_to_tensorboard,
    )
