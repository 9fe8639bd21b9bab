"""The gradient of a bias that was added without autograd's knowledge."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.kernels.autograd import apply


def with_bias(x: Tensor, bias_f: Tensor | None) -> Tensor:
    """Return ``x``, which holds a bias: its gradient is that of ``x`` summed over all rows.

    Args:
        x: [..., f].
        bias_f: the bias, or ``None``.
    """
    return x if bias_f is None else apply(_WithBias, x, bias_f)


class _WithBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias_f: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.reshape(-1, grad.shape[-1]).sum(0)
