"""Activations that save less for their backward than autograd would, and the gradient of a bias."""

from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from megatron.kernels.autograd import apply, once_differentiable


class Gated(torch.autograd.Function):
    """``function(gate) * up``, where the function is silu or the tanh approximation of GELU.

    Saves only its input; the backward forms ``function(gate)`` again, to the same bits.
    """

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, gelu: bool) -> Tensor:
        """[..., 2 f], the gate first -> [..., f]."""
        ctx.save_for_backward(gate_up)
        ctx.gelu = gelu
        gate, up = gate_up.chunk(2, dim=-1)
        return _gate(gate, gelu).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of ``gate_up``; each half is written in its place."""
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        gate_up_grad = torch.empty_like(gate_up)
        gate_grad, up_grad = gate_up_grad.chunk(2, dim=-1)
        torch.mul(_gate(gate, ctx.gelu), grad, out=up_grad)
        if ctx.gelu:
            gate_grad.copy_(torch.ops.aten.gelu_backward(grad * up, gate, approximate="tanh"))
        else:
            torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=gate_grad)
        return gate_up_grad, None


def _gate(gate: Tensor, gelu: bool) -> Tensor:
    value: Tensor = functional.gelu(gate, approximate="tanh") if gelu else functional.silu(gate)
    return value


class QuickGated(torch.autograd.Function):
    """``g sigmoid(1.702 g) (u + offset)``, with g and u the gate and up, maybe clamped.

    Saves only its input. Where an input is clamped, its gradient is 0.
    """

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, limit: float | None, offset: float) -> Tensor:
        """[..., 2 f], the gate first -> [..., f]."""
        ctx.save_for_backward(gate_up)
        ctx.limit, ctx.offset = limit, offset
        gate, up = _clamped(gate_up, limit)
        return torch.sigmoid(_QUICK * gate).mul_(gate).mul_(up + offset)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of ``gate_up``; each half is written in its place."""
        (gate_up,) = ctx.saved_tensors
        gate, up = _clamped(gate_up, ctx.limit)
        gate_up_grad = torch.empty_like(gate_up)
        gate_grad, up_grad = gate_up_grad.chunk(2, dim=-1)
        sigmoid = torch.sigmoid(_QUICK * gate)
        torch.mul(sigmoid * gate, grad, out=up_grad)
        slope = sigmoid * (1 + _QUICK * gate * (1 - sigmoid))
        torch.mul(slope.mul_(up + ctx.offset), grad, out=gate_grad)
        if ctx.limit is not None:
            raw_gate, raw_up = gate_up.chunk(2, dim=-1)
            gate_grad.masked_fill_(raw_gate > ctx.limit, 0.0)
            up_grad.masked_fill_(raw_up.abs() > ctx.limit, 0.0)
        return gate_up_grad, None, None


_QUICK: Final = 1.702
"""The factor with which a sigmoid comes near GELU (arXiv 1606.08415, section 2)."""


def _clamped(gate_up: Tensor, limit: float | None) -> tuple[Tensor, Tensor]:
    """Return the gate, at most ``limit``, and up, from ``-limit`` to ``limit``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (gate, up) if limit is None else (gate.clamp(max=limit), up.clamp(-limit, limit))


class SquaredReLU(torch.autograd.Function):
    """``relu(x)^2``; it saves its output, which the next linear layer keeps anyway.

    The slope is ``2 relu(x)``. The backward takes the root of the output for ``relu(x)``: the root
    of a correctly rounded square is the number itself.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Any shape and floating type."""
        out = x.clamp_min(0)
        out.mul_(out)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """``2 relu(x) grad``."""
        out: Tensor
        (out,) = ctx.saved_tensors
        return out.sqrt().mul_(grad).mul_(2)


def with_bias(x: Tensor, bias_f: Tensor | None) -> Tensor:
    """Return ``x``, and tell autograd about a bias that was added to it unrecorded.

    The gradient of the bias is the gradient of ``x``, summed over all rows.

    Args:
        x: [..., f].
        bias_f: the bias; ``None``: there is none.
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
