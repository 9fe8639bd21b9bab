"""The global gradient norm, in which every parameter of the model counts once, and clipping by it.

A rank sums its own squares; the sum over ranks is the caller's all-reduce; the clip coefficient is
the same everywhere because the norm is.
"""

from collections.abc import Iterable

import torch

from megatron.optimizer.parameters import ParameterPart

# Summing 64M fp32 squares in one go loses 1.2 % on the CPU (one running sum per SIMD lane); blocks
# of this many, added up in fp64, lose 1e-8 (4e-6 at worst) and run at the speed of memory.
BLOCK_ELEMENTS = 4096


def local_sum_of_squares(parts: Iterable[ParameterPart], device: torch.device) -> torch.Tensor:
    """Sum the squared entries of the gradients that count on this rank.

    Args:
        parts: of this rank; those with ``counts_in_norm`` enter the sum.
        device: of the gradients.

    Returns:
        float64 [] on the device; its sum over ranks is the squared global norm.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for part in parts:
        if part.counts_in_norm:
            total += sum_of_squares(part.gradient)
    return total


def sum_of_squares(tensor: torch.Tensor) -> torch.Tensor:
    """Sum of squares in float64 [] of a contiguous tensor: fp32 within blocks, fp64 across."""
    flat, dtype = tensor.view(-1), torch.promote_types(tensor.dtype, torch.float32)
    whole = flat.numel() - flat.numel() % BLOCK_ELEMENTS
    block_norms: torch.Tensor = torch.linalg.vector_norm(
        flat[:whole].view(-1, BLOCK_ELEMENTS), dim=1, dtype=dtype
    )
    tail_norm: torch.Tensor = torch.linalg.vector_norm(flat[whole:], dtype=dtype)
    return block_norms.double().square().sum() + tail_norm.double().square()


def clip_coefficient(norm: float, limit: float) -> float:
    """The factor that brings a gradient of this norm to at most ``limit``.

    Args:
        norm: global gradient norm.
        limit: largest norm allowed; 0 switches clipping off.

    Returns:
        ``min(1, limit / (norm + 1e-6))`` as in Megatron, or 1 without a limit.
    """
    return min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0
