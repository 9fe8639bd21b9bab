"""Gated activations on a GPU, one kernel forward and one backward; only the input is saved."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.kernels.cuda import operators


class Gated(torch.autograd.Function):
    """``function(gate) * up``, the function silu or GELU by its tanh approximation."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, gelu: bool) -> Tensor:
        """[..., 2 f], the gate first -> [..., f]."""
        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up)
        ctx.gelu = gelu
        out = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
        operators.gated(_rows(out), _rows(gate_up), gelu)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Write both halves of the gradient where they belong."""
        (gate_up,) = ctx.saved_tensors
        gate_up_grad = torch.empty_like(gate_up)
        rows = _rows(gate_up_grad), _rows(gate_up), _rows(grad.contiguous())
        operators.gated_backward(*rows, ctx.gelu)
        return gate_up_grad, None


def _rows(x: Tensor) -> Tensor:
    return x.view(-1, x.shape[-1])
