"""The global gradient norm, in which every parameter of the model counts once, and clipping by it.

A rank sums its own squares, and the caller sums over the ranks. All ranks then have the same norm,
and so the same clip coefficient.
"""

from collections.abc import Iterable

import torch

from megatron.kernels.face import Kernels
from megatron.optimizer.parameters import ParameterPart


def local_sum_of_squares(
    parts: Iterable[ParameterPart], kernels: Kernels, device: torch.device
) -> torch.Tensor:
    """Sum the squared entries of the gradients that count on this rank.

    Args:
        parts: of this rank; only parts with ``counts_in_norm`` enter the sum.
        kernels: of the device.
        device: of the gradients.

    Returns:
        float64 [] on the device; its sum over ranks is the squared global norm.
    """
    gradients = [part.gradient for part in parts if part.counts_in_norm]
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    return kernels.sum_of_squares(gradients)


def clip_coefficient(norm: float, limit: float) -> float:
    """Return the factor that scales a gradient of norm ``norm`` to at most ``limit``.

    Args:
        norm: global gradient norm.
        limit: largest norm allowed; 0 switches clipping off.

    Returns:
        ``min(1, limit / (norm + 1e-6))`` as in Megatron, or 1 without a limit.
    """
    return min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0
