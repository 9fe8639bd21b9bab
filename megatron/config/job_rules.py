"""The rules about the job that the flags need: its ranks, its devices, its files."""

import os
from collections.abc import Callable, Iterator
from functools import partial

import torch

from megatron.config.data_flags import parse_data_path
from megatron.config.flags import Flags
from megatron.config.resolve import vocabulary
from megatron.config.rules import Rule
from megatron.data.indexed import IndexedDataset


def job_rules(world_size: int, dry_run: bool) -> tuple[Rule, ...]:
    """The rules for a job of ``world_size`` ranks; a dry run needs no ranks, devices or data."""
    always = (_tensor_parallel, _load, _tokenizer)
    if dry_run:
        return always
    return (*always, partial(_ranks, world_size), _device, _backend, _data_files)


def _tensor_parallel(flags: Flags) -> Iterator[str]:
    size = flags.parallel.tensor_model_parallel_size
    if size != 1:
        yield (
            f"--tensor-model-parallel-size {size}: layers are not split over ranks yet; use 1, and "
            "more pipeline ranks instead"
        )


def _ranks(world_size: int, flags: Flags) -> Iterator[str]:
    size = flags.parallel.pipeline_model_parallel_size
    if size > world_size:
        yield (
            f"--pipeline-model-parallel-size {size} is more than the {world_size} rank(s) of this "
            f"job (WORLD_SIZE): start {size} ranks, or lower it to {world_size}"
        )
    if size < world_size:
        yield (
            f"--pipeline-model-parallel-size {size} leaves ranks of this job idle (WORLD_SIZE is "
            f"{world_size}; there is no data parallelism yet): start {size} rank(s), or raise it "
            f"to {world_size}"
        )


def _device(flags: Flags) -> Iterator[str]:
    cuda = torch.cuda.is_available()
    if flags.parallel.device == "cuda" and not cuda:
        yield (
            "--device cuda: PyTorch finds no CUDA device here; use --device cpu, or install a "
            "CUDA build of PyTorch and a driver"
        )
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if cuda and flags.parallel.device != "cpu" and local_ranks > torch.cuda.device_count():
        yield (
            f"--nproc-per-node {local_ranks}: this machine has {torch.cuda.device_count()} CUDA "
            "devices and every rank needs its own: start as many ranks as devices, or use "
            "--device cpu"
        )


def _backend(flags: Flags) -> Iterator[str]:
    on_cuda = torch.cuda.is_available() and flags.parallel.device != "cpu"
    if flags.parallel.distributed_backend == "nccl" and not on_cuda:
        yield (
            "--distributed-backend nccl needs CUDA, and this run computes on CPUs: use gloo, or "
            "leave it out"
        )
    if flags.parallel.distributed_backend == "gloo" and on_cuda:
        yield (
            "--distributed-backend gloo cannot send CUDA tensors from stage to stage: use nccl, "
            "leave it out, or compute on CPUs with --device cpu"
        )


def _load(flags: Flags) -> Iterator[str]:
    load = flags.train.load
    if load is None:
        return
    if (load / "latest_checkpointed_iteration.txt").is_file():
        fault = "checkpoints are not read yet"
    else:
        fault = (
            "there is no checkpoint in this folder (it has no latest_checkpointed_iteration.txt)"
        )
    yield f"--load {load}: {fault}; leave the flag out to start from scratch"


def _data_files(flags: Flags) -> Iterator[str]:
    """Open every file, so that a broken one is found before any process group exists."""
    try:
        blend = parse_data_path(flags.data.data_path)
    except ValueError:
        return  # the rules about the flags tell it
    for _, prefix in blend:
        for fault in _faults(partial(IndexedDataset, prefix)):
            yield f"--data-path {prefix}: {fault}"


def _tokenizer(flags: Flags) -> Iterator[str]:
    data = flags.data
    needless = flags.log.dry_run or data.mock_data
    if data.tokenizer_type is None and not (needless and data.vocab_size):
        yield (
            "--tokenizer-type is missing: give GPTSentencePieceTokenizer with --tokenizer-model "
            "FILE, or NullTokenizer with --vocab-size N for data without a tokenizer; with "
            "--mock-data, --vocab-size N alone is enough"
        )
    else:
        yield from _faults(partial(vocabulary, data, flags.log.dry_run))


def _faults(work: Callable[[], object]) -> Iterator[str]:
    try:
        work()
    except (ValueError, OSError) as error:
        yield str(error)
