"""Activations on a GPU, with and without a gate."""

from typing import Any

import torch
from torch import Tensor

from megatron.kernels.autograd import once_differentiable
from megatron.kernels.cuda import row_operators as operators
from megatron.kernels.cuda.row_operators import as_rows
from megatron.kernels.cuda.sizes import quotient


class Activation(torch.autograd.Function):
    """The tanh approximation of GELU, or ``relu(x)^2``.

    GELU saves its input, and ``relu(x)^2`` its output. The backward also forms the gradient of a
    bias that was added before.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias_f: Tensor | None, gelu: bool) -> Tensor:
        """[..., f] -> [..., f]; ``bias_f`` is already in ``x``."""
        x = x.contiguous()
        out = torch.empty_like(x)
        operators.activation(out, x, gelu)
        ctx.save_for_backward(x if gelu else out)
        ctx.gelu, ctx.bias_dtype = gelu, None if bias_f is None else bias_f.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of input and bias."""
        (kept,) = ctx.saved_tensors
        x_grad, partial_1kf = torch.empty_like(kept), None
        if ctx.bias_dtype is not None:
            f = kept.shape[-1]
            spans = quotient(kept.numel() // f, operators.ACTIVATION_SPAN)
            partial_1kf = kept.new_empty(1, spans, f, dtype=torch.float32)
        operators.activation_backward(
            x_grad,
            None if partial_1kf is None else partial_1kf[0],
            kept,
            grad.contiguous(),
            ctx.gelu,
        )
        if partial_1kf is None:
            return x_grad, None, None
        sums_1f = kept.new_empty(1, f, dtype=ctx.bias_dtype)
        operators.column_sums(sums_1f, partial_1kf)
        return x_grad, sums_1f[0], None


class Gated(torch.autograd.Function):
    """``function(gate) * up``, where the function is silu or the tanh approximation of GELU.

    One kernel forward and one backward; only the input is saved.
    """

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, gelu: bool) -> Tensor:
        """[..., 2 f], the gate first -> [..., f]."""
        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up)
        ctx.gelu = gelu
        out = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
        operators.gated(as_rows(out), as_rows(gate_up), gelu)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of ``gate_up``; each half is written in its place."""
        (gate_up,) = ctx.saved_tensors
        gate_up_grad = torch.empty_like(gate_up)
        rows = as_rows(gate_up_grad), as_rows(gate_up), as_rows(grad.contiguous())
        operators.gated_backward(*rows, ctx.gelu)
        return gate_up_grad, None
