"""An activation of a rank's own tokens that enters work on all tokens without a linear layer."""

from typing import Any

import torch
from torch import Tensor

from megatron.kernels.autograd import apply, once_differentiable
from megatron.parallel.tensor import TensorParallel


def gathered(x_buh: Tensor, tensor: TensorParallel) -> Tensor:
    """Return [b, s, h] of all tokens, which each tensor-parallel rank uses for its own heads.

    The backward sums the gradients of all ranks, for the tokens of this rank.
    """
    return x_buh if tensor.size == 1 else apply(_Gathered, x_buh, tensor)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_buh: Tensor, tensor: TensorParallel) -> Tensor:
        ctx.tensor = tensor
        x_bsh = tensor.gather(x_buh)
        return x_bsh.view_as(x_bsh)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_bsh: Tensor) -> tuple[Tensor, None]:
        # A copy: the sum is formed in place, and autograd may give the same gradient to others.
        return ctx.tensor.reduce(grad_bsh.clone()), None
