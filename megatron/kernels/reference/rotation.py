"""The rotation of queries and keys (RoPE), with an implementation in PyTorch's operations.

Shapes: b batch, s sequence, a heads, d channels of a head, p rotated pairs.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from megatron.kernels.autograd import once_differentiable

Turn: TypeAlias = Callable[[Tensor, Tensor, Tensor, bool, bool], Tensor]
"""A function that returns queries or keys [b, s, a, d], turned by angles, as a dense tensor.

Its arguments are the queries or keys (of any strides), cosines, sines, whether the channels of a
pair are neighbours, and whether to turn back.
"""


class Rotation(torch.autograd.Function):
    """Its backward rotates back, since a rotation is orthogonal; it saves only the angles."""

    @staticmethod
    def forward(
        ctx: Any, x_bsad: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, turn: Turn
    ) -> Tensor:
        """See ``Kernels.rotate``; ``turn`` is the function of the device."""
        ctx.save_for_backward(cos, sin)
        ctx.interleaved, ctx.turn = interleaved, turn
        return turn(x_bsad, cos, sin, interleaved, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_bsad: Tensor) -> tuple[Tensor | None, ...]:
        """Rotate back."""
        cos, sin = ctx.saved_tensors
        return ctx.turn(grad_bsad, cos, sin, ctx.interleaved, True), None, None, None, None


def turn(x_bsad: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool) -> Tensor:
    """As ``Turn``, in PyTorch's operations."""
    sin = -sin if back else sin
    # fp32 for bf16 inputs, float64 for float64 inputs
    wide_type = torch.promote_types(x_bsad.dtype, cos.dtype)
    pairs, rotated = cos.shape[-1], 2 * cos.shape[-1]
    channels = (
        (slice(0, rotated, 2), slice(1, rotated, 2))
        if interleaved
        else (slice(0, pairs), slice(pairs, rotated))
    )
    first, second = (x_bsad[..., own].to(wide_type) for own in channels)
    out = torch.empty(x_bsad.shape, dtype=x_bsad.dtype, device=x_bsad.device)
    out[..., channels[0]] = (first * cos).sub_(second * sin)
    out[..., channels[1]] = (second * cos).add_(first * sin)
    out[..., rotated:] = x_bsad[..., rotated:]
    return out
