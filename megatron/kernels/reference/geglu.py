"""GeGLU that saves less for its backward than autograd would."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional


class GeGLU(torch.autograd.Function):
    """Saves only its input; the backward forms ``gelu(gate)`` again, to the same bits."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        """[..., 2 f], the gate first -> [..., f]; GELU by its tanh approximation."""
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        inner: Tensor = functional.gelu(gate, approximate="tanh").mul_(up)
        return inner

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Write both halves of the gradient where they belong."""
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        gate_up_grad = torch.empty_like(gate_up)
        gate_grad, up_grad = gate_up_grad.chunk(2, dim=-1)
        torch.mul(functional.gelu(gate, approximate="tanh"), grad, out=up_grad)
        gate_grad.copy_(torch.ops.aten.gelu_backward(grad * up, gate, approximate="tanh"))
        return gate_up_grad
