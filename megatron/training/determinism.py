"""Runs that agree to the last bit on GPUs too (``--deterministic-mode``).

Sums of floating-point numbers depend on their order. On CPUs the order is always the same. On GPUs
three kinds of code leave it open, and have another way: kernels with atomic additions (ours asks
PyTorch for its setting, as flash-attn's call does), cuBLAS on several streams, and collectives.
"""

from typing import Any

import torch

from megatron.parallel.environment import set_deterministic_environment
from megatron.parallel.settings import DeviceSettings


def follow_mode(devices: DeviceSettings) -> None:
    """Let this process add up in one order, if it is asked for it and computes on a GPU.

    Call it before the first use of a GPU. An operation of PyTorch that has no such order raises a
    ``RuntimeError`` from then on.

    Args:
        devices: of the run, resolved.
    """
    if not devices.deterministic_mode or devices.device != "cuda":
        return
    set_deterministic_environment()
    torch.use_deterministic_algorithms(True)
    # PyTorch would also fill new memory, which changes no result of a program that reads what it
    # wrote, and takes time.
    settings: Any = torch.utils.deterministic  # whose attributes PyTorch declares to no checker
    settings.fill_uninitialized_memory = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
