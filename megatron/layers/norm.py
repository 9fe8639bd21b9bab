"""The two norms of a GPT block; both compute in fp32 whatever the type of their input."""

from typing import Literal

import torch
from torch import nn


def build_norm(
    kind: Literal["LayerNorm", "RMSNorm"],
    size: int,
    epsilon: float,
    dtype: torch.dtype,
    device: torch.device,
) -> nn.LayerNorm | nn.RMSNorm:
    """A norm over the last dimension with weight 1 and, for LayerNorm, bias 0.

    Args:
        kind: ``LayerNorm`` or ``RMSNorm``.
        size: length of the last dimension.
        epsilon: added to the variance (LayerNorm) or the mean square (RMSNorm).
        dtype: type of the parameters.
        device: where the parameters live.

    Raises:
        ValueError: ``kind`` is neither of the two.
    """
    if kind == "LayerNorm":
        return nn.LayerNorm(size, epsilon, device=device, dtype=dtype)
    if kind == "RMSNorm":
        return nn.RMSNorm(size, epsilon, device=device, dtype=dtype)
    raise ValueError(f"unknown normalization {kind!r}: choose LayerNorm or RMSNorm")
