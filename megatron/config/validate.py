"""Refuses flags that make no run, before anything is built: flag, value and way out.

The order is that of the flags' groups; the first fault found is the one reported. Combinations in
which a flag would have no effect are faults too: no flag is accepted and ignored.
"""

import os
from pathlib import Path

import torch

from megatron.config.flags import (
    DataFlags,
    Flags,
    ModelFlags,
    OptimizerFlags,
    ParallelFlags,
    TrainFlags,
)
from megatron.config.ranges import check_ranges
from megatron.config.validate_log import check_log


def check_flags(flags: Flags, world_size: int) -> None:
    """Refuse what no run can be made of, as far as the flags themselves tell.

    Args:
        flags: as given, defaults not yet resolved.
        world_size: ranks of the job.

    Raises:
        ValueError: naming the flag, its value and a way out.
    """
    check_ranges(flags)
    _check_model(flags.model)
    _check_positions(flags.model)
    _check_tensor_parallel(flags.parallel)
    if not flags.log.dry_run:
        _check_ranks(flags.parallel, world_size)
        _check_device(flags.parallel)
    _check_batches(flags.train)
    _check_load(flags.train.load)
    _check_learning_rate(flags.optimizer)
    _check_spans(flags.optimizer, in_samples=flags.train.train_samples is not None)
    if not flags.log.dry_run:
        _check_data(flags.data)
    _check_tokenizer(flags.data, flags.log.dry_run)
    check_log(flags.log, flags.pipeline)


def _check_model(model: ModelFlags) -> None:
    heads = model.num_attention_heads
    if model.kv_channels is None and model.hidden_size % heads:
        raise ValueError(
            f"--num-attention-heads {heads} does not divide --hidden-size {model.hidden_size}: "
            "change one of them, or give the width of a head with --kv-channels"
        )
    if model.num_query_groups is not None and not model.group_query_attention:
        raise ValueError(
            f"--num-query-groups {model.num_query_groups} has no effect by itself: "
            "add --group-query-attention"
        )
    if heads % (model.num_query_groups or 1):
        raise ValueError(
            f"--num-query-groups {model.num_query_groups} does not divide "
            f"--num-attention-heads {heads}: every group needs as many query heads"
        )
    if model.swiglu and model.ffn_hidden_size is None and model.hidden_size < 24:
        raise ValueError(
            f"--swiglu with --hidden-size {model.hidden_size} leaves an MLP without width, "
            "as its default is a multiple of 64: give --ffn-hidden-size"
        )


def _check_positions(model: ModelFlags) -> None:
    positions = model.max_position_embeddings
    if positions is not None and model.seq_length > positions:
        raise ValueError(
            f"--seq-length {model.seq_length} is longer than --max-position-embeddings "
            f"{positions}: raise the latter, or leave it out"
        )
    if model.position_embedding_type == "rope":
        head = model.kv_channels or model.hidden_size // model.num_attention_heads
        rotated = int(head * model.rotary_percent)
        if rotated < 2 or rotated % 2:
            raise ValueError(
                f"--rotary-percent {model.rotary_percent} rotates {rotated} of the {head} "
                "channels of a head: it takes an even number of them, at least 2"
            )
        return
    for flag, value, default in (
        ("--rotary-base", model.rotary_base, ModelFlags.rotary_base),
        ("--rotary-percent", model.rotary_percent, ModelFlags.rotary_percent),
    ):
        if value != default:
            raise ValueError(
                f"{flag} {value} has no effect without --position-embedding-type rope: "
                "add that, or leave it out"
            )


def _check_tensor_parallel(parallel: ParallelFlags) -> None:
    if parallel.tensor_model_parallel_size != 1:
        raise ValueError(
            f"--tensor-model-parallel-size {parallel.tensor_model_parallel_size}: layers are not "
            "split over ranks yet; use 1, and more pipeline ranks instead"
        )


def _check_ranks(parallel: ParallelFlags, world_size: int) -> None:
    size = parallel.pipeline_model_parallel_size
    if size > world_size:
        raise ValueError(
            f"--pipeline-model-parallel-size {size} is more than the {world_size} rank(s) of this "
            f"job (WORLD_SIZE): start {size} ranks, or lower it to {world_size}"
        )
    if size < world_size:
        raise ValueError(
            f"--pipeline-model-parallel-size {size} leaves ranks of this job idle (WORLD_SIZE is "
            f"{world_size}; there is no data parallelism yet): start {size} rank(s), or raise it "
            f"to {world_size}"
        )


def _check_device(parallel: ParallelFlags) -> None:
    cuda = torch.cuda.is_available()
    if parallel.device == "cuda" and not cuda:
        raise ValueError(
            "--device cuda: PyTorch finds no CUDA device here; use --device cpu, or install a "
            "CUDA build of PyTorch and a driver"
        )
    on_cuda = cuda and parallel.device != "cpu"
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if on_cuda and local_ranks > torch.cuda.device_count():
        raise ValueError(
            f"--nproc-per-node {local_ranks}: this machine has {torch.cuda.device_count()} CUDA "
            "devices and every rank needs its own: start as many ranks as devices, or use "
            "--device cpu"
        )
    if parallel.distributed_backend == "nccl" and not on_cuda:
        raise ValueError(
            "--distributed-backend nccl needs CUDA, and this run computes on CPUs: use gloo, or "
            "leave it out"
        )
    if parallel.distributed_backend == "gloo" and on_cuda:
        raise ValueError(
            "--distributed-backend gloo cannot send CUDA tensors from stage to stage: use nccl, "
            "leave it out, or compute on CPUs with --device cpu"
        )


def _check_batches(train: TrainFlags) -> None:
    micro, batch = train.micro_batch_size, train.global_batch_size
    if batch is not None and batch % micro:
        raise ValueError(
            f"--global-batch-size {batch} is not divisible by --micro-batch-size {micro}: "
            f"use {_multiples_near(batch, micro)}"
        )
    if (train.train_iters is None) == (train.train_samples is None):
        given = "neither is given" if train.train_iters is None else "both are given"
        raise ValueError(f"--train-iters or --train-samples: {given}; give one of them")
    if train.train_samples is not None and train.train_samples < (batch or micro):
        raise ValueError(
            f"--train-samples {train.train_samples} is less than one iteration of "
            f"{batch or micro} samples: raise it, or lower --global-batch-size"
        )
    if train.eval_interval is None and train.eval_iters not in (0, TrainFlags.eval_iters):
        raise ValueError(
            f"--eval-iters {train.eval_iters} has no effect without --eval-interval: add that, or "
            "leave it out"
        )


def _check_load(load: Path | None) -> None:
    if load is None:
        return
    if not (load / "latest_checkpointed_iteration.txt").is_file():
        raise ValueError(
            f"--load {load}: there is no checkpoint in this folder (it has no "
            "latest_checkpointed_iteration.txt); leave the flag out to start from scratch"
        )
    raise ValueError(
        f"--load {load}: checkpoints are not read yet; leave the flag out to start from scratch"
    )


def _check_learning_rate(optimizer: OptimizerFlags) -> None:
    if optimizer.lr is None:
        raise ValueError("--lr is missing: give the peak learning rate, for example --lr 3e-4")
    for flag, value in (
        ("--min-lr", optimizer.min_lr),
        ("--lr-warmup-init", optimizer.lr_warmup_init),
    ):
        if value > optimizer.lr:
            raise ValueError(f"{flag} {value} is above --lr {optimizer.lr}: lower it")
    if optimizer.lr_decay_style == "constant" and optimizer.min_lr != OptimizerFlags.min_lr:
        raise ValueError(
            f"--min-lr {optimizer.min_lr} has no effect with --lr-decay-style constant: leave it "
            "out, or let the rate decay (linear, cosine)"
        )
    decays = _given(
        ("--lr-decay-iters", optimizer.lr_decay_iters),
        ("--lr-decay-samples", optimizer.lr_decay_samples),
    )
    if optimizer.lr_decay_style == "constant" and decays and not optimizer.lr_warmup_fraction:
        raise ValueError(
            f"{decays[0]} has no effect with --lr-decay-style constant: leave it out, or let the "
            "rate decay (linear, cosine)"
        )
    warmups = _given(
        ("--lr-warmup-iters", optimizer.lr_warmup_iters),
        ("--lr-warmup-samples", optimizer.lr_warmup_samples),
        ("--lr-warmup-fraction", optimizer.lr_warmup_fraction),
    )
    if len(warmups) > 1:
        raise ValueError(f"the warm-up is given twice, by {' and '.join(warmups)}: give one")
    if optimizer.lr_warmup_init != OptimizerFlags.lr_warmup_init and not warmups:
        raise ValueError(
            f"--lr-warmup-init {optimizer.lr_warmup_init} has no effect without a warm-up: add "
            "--lr-warmup-iters, or leave it out"
        )


def _check_spans(optimizer: OptimizerFlags, in_samples: bool) -> None:
    """The decay and the warm-up must be counted as the training is, in samples or iterations."""
    unit, wanted = ("iters", "samples") if in_samples else ("samples", "iters")
    for name in (f"lr_decay_{unit}", f"lr_warmup_{unit}"):
        value = getattr(optimizer, name)
        if value:
            flag = "--" + name.replace("_", "-")
            raise ValueError(
                f"{flag} {value} does not go with --train-{wanted}: use "
                f"{flag.replace(unit, wanted)}, or --train-{unit}"
            )


def _check_data(data: DataFlags) -> None:
    if not data.data_path:
        raise ValueError(
            "--data-path is missing: give the prefix of a .bin and .idx file; "
            "tools/sample_data.py makes some in seconds and prints it"
        )


def _check_tokenizer(data: DataFlags, dry_run: bool) -> None:
    if data.tokenizer_type is None and not (dry_run and data.vocab_size):
        raise ValueError(
            "--tokenizer-type is missing: give GPTSentencePieceTokenizer with --tokenizer-model "
            "FILE, or NullTokenizer with --vocab-size N for data without a tokenizer"
        )
    if data.tokenizer_type == "NullTokenizer" and data.tokenizer_model is not None:
        raise ValueError(
            f"--tokenizer-model {data.tokenizer_model} has no effect with NullTokenizer: leave it "
            "out, or give another --tokenizer-type"
        )


def _given(*flags: tuple[str, float | None]) -> list[str]:
    """The flags that are set, with their values."""
    return [f"{flag} {value}" for flag, value in flags if value]


def _multiples_near(number: int, divisor: int) -> str:
    """The multiples of ``divisor`` around ``number``, in words."""
    below = number // divisor * divisor
    return f"{below} or {below + divisor}" if below else f"{divisor}"
