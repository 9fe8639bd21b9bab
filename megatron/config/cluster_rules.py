"""The rules about GPUs and machines."""

from collections.abc import Iterator
from typing import Final

import torch

from megatron.config.cluster_flags import ClusterFlags
from megatron.config.declare import Flags, options_of
from megatron.config.flags import LogFlags, ParallelFlags, TrainFlags


def on_cuda(flags: Flags) -> bool:
    """Return whether the ranks compute on CUDA devices."""
    return flags[ParallelFlags].device != "cpu" and torch.cuda.is_available()


def _idle_on_cpus(flags: Flags) -> Iterator[str]:
    if on_cuda(flags):
        return
    usual = dict(options_of(ClusterFlags, ClusterFlags()))
    for option, value in options_of(ClusterFlags, flags[ClusterFlags]):
        if value != usual[option] and option not in ("--ranks-per-node", "--rank-order"):
            words = option if value is True else f"{option} {value}"
            yield f"{words} changes nothing: {_on_cpus(option)}"


def _on_cpus(option: str) -> str:
    if option.startswith("--nccl"):
        return "ranks on CPUs communicate with gloo"
    if option == "--no-numa-binding":
        return "ranks on CPUs are bound to none"
    return "ranks on CPUs plan with free communication, until its time is measured"


def _memory_of_cpus(flags: Flags) -> Iterator[str]:
    if flags[LogFlags].record_memory_history and not on_cuda(flags):
        yield "--record-memory-history changes nothing: PyTorch remembers allocations on GPUs only"


def _drawn_by_cpus(flags: Flags) -> Iterator[str]:
    if flags[TrainFlags].use_cpu_initialization and not on_cuda(flags):
        yield "--use-cpu-initialization changes nothing: ranks on CPUs draw their weights there"


CLUSTER_NOTES: Final = (_idle_on_cpus, _memory_of_cpus, _drawn_by_cpus)
