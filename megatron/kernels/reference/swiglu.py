"""SwiGLU that saves less for its backward than autograd would."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional


class SwiGLU(torch.autograd.Function):
    """Saves only its input; the backward forms ``silu(gate)`` again, to the same bits."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        """[..., 2 f], the gate first -> [..., f]."""
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Write both halves of the gradient where they belong."""
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        gate_up_grad = torch.empty_like(gate_up)
        gate_grad, up_grad = gate_up_grad.chunk(2, dim=-1)
        torch.mul(functional.silu(gate), grad, out=up_grad)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=gate_grad)
        return gate_up_grad
