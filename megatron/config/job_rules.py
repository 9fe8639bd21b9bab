"""The rules about the job that the flags need: its ranks, its devices, its files."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

import torch

from megatron.config.cluster_rules import CLUSTER_NOTES, on_cuda
from megatron.config.corpora import prefixes
from megatron.config.declare import Flags, Rule, cut, options_of
from megatron.config.eight_bit_rules import (
    eight_bits_of_device,
    eight_bits_on_cpus,
    pytorch_for_transformer_engine,
    transformer_engine_of_device,
)
from megatron.config.flags import (
    DataFlags,
    LogFlags,
    ModelFlags,
    ParallelFlags,
    PipelineFlags,
    TrainFlags,
)
from megatron.config.gpu_driver import why_gpus_are_out_of_reach
from megatron.config.installed import tensorboard_rule, wandb_rule
from megatron.config.lengths import growth_of
from megatron.config.long_run_flags import ReplicaFlags
from megatron.config.optimizer_flags import OptimizerFlags
from megatron.config.optimizer_impl import IMPLEMENTATION_OF_MACHINE
from megatron.config.pipeline_asks import treatment_of
from megatron.config.pipeline_flags import settle_pipeline, size_faults
from megatron.config.precision_flags import PrecisionFlags
from megatron.config.resolve import number_of_replicas, ranks_of_replica, vocabulary
from megatron.config.tokenizer_flags import TokenizerFlags
from megatron.data.indexed import IndexedDataset
from megatron.model.distribution import distribute
from megatron.schedules.counted import counted
from megatron.schedules.plan import Plan
from megatron.schedules.plan_file import load_any_plan, misfits, treatments_of

CPUINFO = Path("/proc/cpuinfo")
"""Linux's description of the CPU."""

_NO_GPUS = "PyTorch finds no CUDA device here; install a driver and a CUDA build of PyTorch"


def job_rules(world_size: int, dry_run: bool) -> tuple[Rule, ...]:
    """The rules for a job of ``world_size`` ranks; a dry run needs no ranks, devices or data."""
    of_all = (_tokenizer, partial(_plan_size, world_size), partial(_plan_file, world_size))
    if dry_run:
        return (*of_all, partial(_predicted_replicas, world_size))
    packages = (tensorboard_rule, wandb_rule)
    of_ranks = partial(_ranks, world_size)
    of_device = (_device, eight_bits_of_device, transformer_engine_of_device, _backend)
    return (*of_all, of_ranks, *of_device, _data_files, *packages)


def job_notes(world_size: int, dry_run: bool) -> tuple[Rule, ...]:
    """The rules about flags that change nothing on this machine, or with so many ranks."""
    alone = partial(_one_replica, world_size)
    eight_bits = (eight_bits_on_cpus, pytorch_for_transformer_engine)
    of_machine = (*eight_bits, *IMPLEMENTATION_OF_MACHINE, *CLUSTER_NOTES)
    here = (_backend_of_cpus, _narrow_products_on_cpus, *of_machine)
    return (alone,) if dry_run else (alone, *here)


def _one_replica(world_size: int, flags: Flags) -> Iterator[str]:
    if number_of_replicas(flags, world_size) * flags[ParallelFlags].context_parallel_size > 1:
        return
    more = " (--dry-run-replicas N plans more)" if flags[LogFlags].dry_run else ""
    for option, value in options_of(ReplicaFlags, flags[ReplicaFlags]):
        if value:
            yield f"{option} changes nothing: there is one replica of the model{more}"


def _plan_size(world_size: int, flags: Flags) -> Iterator[str]:
    yield from size_faults(flags, number_of_replicas(flags, world_size))


def _ranks(world_size: int, flags: Flags) -> Iterator[str]:
    size, asked = ranks_of_replica(flags[ParallelFlags]), _asked_for_a_replica(flags)
    if size > world_size:
        sizes = flags[ParallelFlags]
        lower = world_size // (sizes.tensor_model_parallel_size * sizes.context_parallel_size)
        lowered = f", or lower it to {lower}" if lower else ", or lower both"
        yield (
            f"{asked} is more than the {counted(world_size, 'rank')} of this job (WORLD_SIZE): "
            f"start {counted(size, 'rank')}{lowered}"
        )
    elif world_size % size:
        below = world_size // size * size
        yield (
            f"{asked} does not divide the {world_size} ranks of this job (WORLD_SIZE) into whole "
            f"replicas: start {below} or {below + size} ranks"
        )
    else:
        yield from _share_of_the_batch(world_size // size, flags)
        yield from _shares_of_growing_batches(world_size // size, flags)
        if world_size > size or flags[ParallelFlags].context_parallel_size > 1:
            yield from _gathering(flags)


def _asked_for_a_replica(flags: Flags) -> str:
    """Return the flags that say how many ranks a replica has, with what they come to."""
    sizes = flags[ParallelFlags]
    pipeline = f"--pipeline-model-parallel-size {sizes.pipeline_model_parallel_size}"
    others = [
        f"{flag} {size}"
        for flag, size in (
            ("--tensor-model-parallel-size", sizes.tensor_model_parallel_size),
            ("--context-parallel-size", sizes.context_parallel_size),
        )
        if size > 1
    ]
    if not others:
        return pipeline
    size = counted(ranks_of_replica(sizes), "rank")
    return f"{' and '.join(others)} with {pipeline}, {size} of a replica,"


def _gathering(flags: Flags) -> Iterator[str]:
    if not flags[ReplicaFlags].overlap_param_gather:
        return
    if not flags[ReplicaFlags].use_distributed_optimizer:
        yield (
            "--overlap-param-gather: every replica updates all parameters, so that nothing is "
            "gathered: add --use-distributed-optimizer, or leave it out"
        )
    if flags[OptimizerFlags].enable_optimizer_post_validation:
        yield (
            "--overlap-param-gather does not go with --enable-optimizer-post-validation: a step "
            "that may be undone is gathered at once; leave one of them out"
        )


def _predicted_replicas(world_size: int, flags: Flags) -> Iterator[str]:
    """Judge the replicas of a dry run as those of a job, whose ranks it does not need."""
    size, replicas = ranks_of_replica(flags[ParallelFlags]), flags[LogFlags].dry_run_replicas
    yield from _ranks(size * replicas if replicas else max(size, world_size), flags)


def _share_of_the_batch(replicas: int, flags: Flags) -> Iterator[str]:
    batch, micro = flags[TrainFlags].global_batch_size, flags[TrainFlags].micro_batch_size
    if batch is None or replicas == 1 or batch % micro or not batch % (micro * replicas):
        return
    near = max(1, batch // (micro * replicas)) * micro * replicas
    yield (
        f"--global-batch-size {batch} does not split into microbatches of {micro} for {replicas} "
        f"replicas: use {near} or another multiple of {micro * replicas}"
    )


def _plan_file(world_size: int, flags: Flags) -> Iterator[str]:
    """Compare a plan's file with the flags; every difference has a line of its own."""
    file, train = flags[PipelineFlags].schedule_file, flags[TrainFlags]
    if file is None:
        return
    try:
        plan = load_any_plan(file)
    except ValueError as error:
        yield f"--schedule-file: {error}"
        return
    share = (train.micro_batch_size or 1) * number_of_replicas(flags, world_size)
    batch = train.global_batch_size or share
    ranks = flags[ParallelFlags].pipeline_model_parallel_size
    for misfit in misfits(plan, ranks, batch // share, treatment_of(flags)):
        way_out = {
            "ranks": f"--pipeline-model-parallel-size {plan.ranks}",
            "microbatches": f"--global-batch-size {plan.microbatches * share}",
            "vocabulary": f"--vocab-parallel {treatments_of(plan)[0]}",
        }[misfit.field]
        yield f"--schedule-file {file} {misfit.fault}: give {way_out}, or another file"
    yield from _layers_of_plan(plan, flags)


def _layers_of_plan(plan: Plan, flags: Flags) -> Iterator[str]:
    """Spread the layers over the stages of a plan's file, if that needs no costs."""
    try:
        layers = settle_pipeline(flags).layers
    except ValueError:
        return  # the rules about the flags tell it
    if layers.kind != "redis":
        spread = partial(distribute, layers, flags[ModelFlags].num_layers, len(plan.stages))
        yield from _faults(spread)


def _shares_of_growing_batches(replicas: int, flags: Flags) -> Iterator[str]:
    try:
        growth = growth_of(flags[TrainFlags])
    except ValueError:
        return  # the rules about the flags tell it
    train = flags[TrainFlags]
    unit = train.micro_batch_size * replicas
    if growth is not None and not growth.are_multiples(unit):
        given, sizes = (
            (f"--rampup-batch-size {' '.join(train.rampup_batch_size)}", "the first two numbers")
            if train.rampup_batch_size
            else (f"--batch-size-steps {' '.join(train.batch_size_steps)}", "all sizes")
        )
        yield (
            f"{given}: not every batch splits into microbatches of {train.micro_batch_size} for "
            f"{replicas} replicas: make {sizes} multiples of {unit}"
        )


def _device(flags: Flags) -> Iterator[str]:
    cuda = torch.cuda.is_available()
    if flags[ParallelFlags].device == "cuda" and not cuda:
        yield f"--device cuda: {why_gpus_are_out_of_reach() or _NO_GPUS}; or use --device cpu"
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or "1")
    if cuda and flags[ParallelFlags].device != "cpu" and local_ranks > torch.cuda.device_count():
        yield (
            f"--nproc-per-node {local_ranks}: this machine has {torch.cuda.device_count()} CUDA "
            "devices and every rank needs its own: start as many ranks as devices, or use "
            "--device cpu"
        )


def _backend(flags: Flags) -> Iterator[str]:
    if flags[ParallelFlags].distributed_backend == "gloo" and on_cuda(flags):
        yield (
            "--distributed-backend gloo cannot send CUDA tensors from stage to stage: use nccl, "
            "leave it out, or compute on CPUs with --device cpu"
        )


def _backend_of_cpus(flags: Flags) -> Iterator[str]:
    if flags[ParallelFlags].distributed_backend == "nccl" and not on_cuda(flags):
        why = why_gpus_are_out_of_reach() if flags[ParallelFlags].device == "auto" else None
        yield (
            f"--distributed-backend nccl changes nothing: {f'{why}; ' if why else ''}ranks on CPUs "
            "communicate with gloo"
        )


def _narrow_products_on_cpus(flags: Flags) -> Iterator[str]:
    for is_asked, name in ((flags[TrainFlags].bf16, "bf16"), (flags[PrecisionFlags].fp16, "fp16")):
        if is_asked and not on_cuda(flags) and not _cpu_multiplies(name):
            yield (
                f"--{name} makes this run slower: this CPU has no instructions for {name} products "
                f"(avx512_{name}, amx_{name}); fp32 is faster here, {name} saves memory"
            )


def _cpu_multiplies(name: str) -> bool:
    """Whether the CPU has instructions for products of such matrices; yes, if it is not known."""
    if not CPUINFO.is_file():
        return True
    words = set(CPUINFO.read_text(encoding="utf-8", errors="replace").split())
    on_arm = {"bf16": "bf16", "fp16": "asimdhp"}[name]
    return not words.isdisjoint((f"avx512_{name}", f"amx_{name}", on_arm))


LONGEST_LINE: Final = 1000
"""Characters of a mistake that quotes a name from a file, which may hold anything."""


def _data_files(flags: Flags) -> Iterator[str]:
    """Open every file, so that a broken one is found before any process group exists."""
    try:
        named = list(prefixes(flags))
    except ValueError:
        return  # the rules about the flags tell it
    for flag, prefix in named:
        for fault in _faults(partial(IndexedDataset, prefix)):
            yield cut(f"{flag} {prefix}: {fault.removeprefix('--data-path: ')}", LONGEST_LINE)


def _tokenizer(flags: Flags) -> Iterator[str]:
    needless = flags[LogFlags].dry_run or flags[DataFlags].mock_data
    if flags[TokenizerFlags].tokenizer_type is None and not (
        needless and flags[TokenizerFlags].vocab_size
    ):
        yield (
            "--tokenizer-type is missing: give GPTSentencePieceTokenizer with --tokenizer-model "
            "FILE, another type that docs/data.md lists, or NullTokenizer with --vocab-size N for "
            "data without a tokenizer; with --mock-data or --dry-run, --vocab-size N is enough"
        )
    else:
        yield from _faults(partial(vocabulary, flags))


def _faults(work: Callable[[], object]) -> Iterator[str]:
    try:
        work()
    except (ValueError, OSError) as error:
        yield str(error)
