"""The rotation of queries and keys on a GPU, one kernel either way.

Shapes: b batch, s sequence, a heads, d channels of a head, p rotated pairs.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.kernels.cuda import row_operators as operators


class Rotation(torch.autograd.Function):
    """Its backward rotates back, since a rotation is orthogonal; only the angles are saved."""

    @staticmethod
    def forward(ctx: Any, x_bsad: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        """[b, s, a, d] of any strides -> a dense tensor of the same shape."""
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _turn(x_bsad, cos, sin, interleaved, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_bsad: Tensor) -> tuple[Tensor | None, ...]:
        """Rotate back."""
        cos, sin = ctx.saved_tensors
        return _turn(grad_bsad, cos, sin, ctx.interleaved, back=True), None, None, None


def _turn(x_bsad: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, *, back: bool) -> Tensor:
    if x_bsad.stride(3) != 1:
        x_bsad = x_bsad.contiguous()
    out_bsad = torch.empty(x_bsad.shape, dtype=x_bsad.dtype, device=x_bsad.device)
    operators.rotate(out_bsad, x_bsad, cos, sin, interleaved, back)
    return out_bsad
