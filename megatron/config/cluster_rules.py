"""The rules about GPUs and machines."""

from collections.abc import Iterator
from typing import Final

import torch

from megatron.config.cluster_flags import ClusterFlags
from megatron.config.declare import options_of
from megatron.config.flags import Flags


def on_cuda(flags: Flags) -> bool:
    """Return whether the ranks compute on CUDA devices."""
    return flags.parallel.device != "cpu" and torch.cuda.is_available()


def _idle_on_cpus(flags: Flags) -> Iterator[str]:
    if on_cuda(flags):
        return
    default = ClusterFlags()
    for option, value in options_of(ClusterFlags, flags.cluster):
        if option.startswith("--nccl") and value != dict(options_of(ClusterFlags, default))[option]:
            yield f"{option} {value} changes nothing: ranks on CPUs communicate with gloo"


CLUSTER_NOTES: Final = (_idle_on_cpus,)
