"""LayerNorm and RMSNorm; both compute in fp32 or better, for any dtype of the input."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from megatron.kernels.face import Kernels

NormKind = Literal["LayerNorm", "RMSNorm"]


def build_norm(
    kind: NormKind,
    size: int,
    epsilon: float,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Kernels,
    *,
    zero_centred: bool = False,
    bias: bool = True,
) -> "LayerNorm | RMSNorm":
    """Return a norm over the last dimension, with scale 1 and, for LayerNorm, bias 0.

    Args:
        kind: ``LayerNorm`` or ``RMSNorm``.
        size: length of the last dimension.
        epsilon: added to the variance (LayerNorm) or the mean square (RMSNorm).
        dtype: of the parameters.
        device: of the parameters.
        kernels: of that device and dtype.
        zero_centred: the parameter is the scale minus 1, so that it starts at 0.
        bias: whether a LayerNorm has a bias; an RMSNorm has none.

    Raises:
        ValueError: ``kind`` is neither of the two.
    """
    if kind == "LayerNorm":
        return LayerNorm(size, epsilon, dtype, device, kernels, zero_centred, bias=bias)
    if kind == "RMSNorm":
        return RMSNorm(size, epsilon, dtype, device, kernels, zero_centred)
    raise ValueError(f"unknown normalization {kind!r}: choose LayerNorm or RMSNorm")


@dataclass(frozen=True)
class Formula:
    """The numbers of a norm, for code that computes the norm outside of its module.

    Attributes:
        scale_h: the scale; autograd connects it with the norm's weight.
        bias_h: the bias; ``None``: the norm is an RMSNorm.
        epsilon: as in ``build_norm``.
        kernels: of the norm.
    """

    scale_h: Tensor
    bias_h: Tensor | None
    epsilon: float
    kernels: Kernels

    def fits(self, x: Tensor) -> bool:
        """Return whether the kernels have a fast backward of this norm for ``x``."""
        return x.dtype == self.scale_h.dtype and x.shape[-1] <= self.kernels.longest_norm


class LayerNorm(nn.LayerNorm):
    """``torch.nn.LayerNorm`` by the kernels of its device; see ``build_norm``.

    The kernels always add a bias. Without a bias of its own, the norm hands zeros to them. The
    zeros are neither a parameter nor a buffer, so that no checkpoint holds them.
    """

    def __init__(
        self,
        size: int,
        epsilon: float,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels,
        zero_centred: bool = False,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__(size, epsilon, device=device, dtype=dtype, bias=bias)
        self._zeros_h = None if bias else torch.zeros(size, dtype=dtype, device=device)
        self._zero_centred = zero_centred
        if zero_centred:
            nn.init.zeros_(self.weight)
        self._kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        """[..., h] -> [..., h], in the type of ``x``."""
        scale = _scale(self.weight, self._zero_centred)
        return self._kernels.layer_norm(x, scale, self._bias_h, self.eps)

    def add(self, x: Tensor, part: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return ``x + part``, or without a part ``x``, and its norm; see ``Kernels``."""
        scale = _scale(self.weight, self._zero_centred)
        return self._kernels.add_layer_norm(x, part, scale, self._bias_h, self.eps)

    def formula(self) -> Formula:
        """Return the norm's scale, bias, epsilon and kernels."""
        scale = _scale(self.weight, self._zero_centred)
        return Formula(scale, self._bias_h, self.eps, self._kernels)

    @property
    def _bias_h(self) -> Tensor:
        return self.bias if self._zeros_h is None else self._zeros_h


class RMSNorm(nn.RMSNorm):
    """``torch.nn.RMSNorm`` by the kernels of its device; see ``build_norm``."""

    def __init__(
        self,
        size: int,
        epsilon: float,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels,
        zero_centred: bool = False,
    ) -> None:
        super().__init__(size, epsilon, device=device, dtype=dtype)
        self._zero_centred = zero_centred
        if zero_centred:
            nn.init.zeros_(self.weight)
        self._epsilon = epsilon
        self._kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        """[..., h] -> [..., h], in the type of ``x``."""
        return self._kernels.rms_norm(x, _scale(self.weight, self._zero_centred), self._epsilon)

    def add(self, x: Tensor, part: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return ``x + part``, or without a part ``x``, and its norm; see ``Kernels``."""
        scale = _scale(self.weight, self._zero_centred)
        return self._kernels.add_rms_norm(x, part, scale, self._epsilon)

    def formula(self) -> Formula:
        """Return the norm's scale, epsilon and kernels."""
        scale = _scale(self.weight, self._zero_centred)
        return Formula(scale, None, self._epsilon, self._kernels)


class NoNorm(nn.Module):
    """Stands in the place of a norm of the residual stream, in a layer that has none.

    Args:
        dtype: of the activations; the stream may be wider.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` in the dtype of the activations."""
        return x.to(self._dtype)

    def add(self, x: Tensor, part: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return ``x + part``, or without a part ``x``, twice; then in the activations' dtype."""
        total = x if part is None else x + part
        return total, self(total)


def _scale(weight_h: Tensor, zero_centred: bool) -> Tensor:
    """Return the scale of a norm: its weight, or the weight plus 1, in the weight's dtype."""
    return weight_h + 1 if zero_centred else weight_h
