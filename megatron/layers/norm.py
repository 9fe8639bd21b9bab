"""The two norms of a GPT block; both compute in fp32 or better, whatever their input's type."""

from typing import Literal

import torch
from torch import Tensor, nn

from megatron.kernels.face import Kernels


def build_norm(
    kind: Literal["LayerNorm", "RMSNorm"],
    size: int,
    epsilon: float,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Kernels,
) -> nn.LayerNorm | nn.RMSNorm:
    """Return a norm over the last dimension with weight 1 and, for LayerNorm, bias 0.

    Args:
        kind: ``LayerNorm`` or ``RMSNorm``.
        size: length of the last dimension.
        epsilon: added to the variance (LayerNorm) or the mean square (RMSNorm).
        dtype: type of the parameters.
        device: where the parameters live.
        kernels: of that device and type.

    Raises:
        ValueError: ``kind`` is neither of the two.
    """
    if kind == "LayerNorm":
        return LayerNorm(size, epsilon, dtype, device, kernels)
    if kind == "RMSNorm":
        return RMSNorm(size, epsilon, dtype, device, kernels)
    raise ValueError(f"unknown normalization {kind!r}: choose LayerNorm or RMSNorm")


class LayerNorm(nn.LayerNorm):
    """``torch.nn.LayerNorm`` by the kernels of its device; see ``build_norm``."""

    def __init__(
        self, size: int, epsilon: float, dtype: torch.dtype, device: torch.device, kernels: Kernels
    ) -> None:
        super().__init__(size, epsilon, device=device, dtype=dtype)
        self._kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        """[..., h] -> [..., h], in the type of ``x``."""
        return self._kernels.layer_norm(x, self.weight, self.bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """``torch.nn.RMSNorm`` by the kernels of its device; see ``build_norm``."""

    def __init__(
        self, size: int, epsilon: float, dtype: torch.dtype, device: torch.device, kernels: Kernels
    ) -> None:
        super().__init__(size, epsilon, device=device, dtype=dtype)
        self._epsilon = epsilon
        self._kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        """[..., h] -> [..., h], in the type of ``x``."""
        return self._kernels.rms_norm(x, self.weight, self._epsilon)
