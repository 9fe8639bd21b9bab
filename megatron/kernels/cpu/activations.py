"""Activations without a gate on a CPU, at the speed of its memory.

PyTorch's bf16 kernel on CPU evaluates a slow tanh in the forward of GELU and again in the backward:
4.7 ms for 512 x 2048 on one core, as long as four matrix products of that layer. Here value and
slope come from one sigmoid, and the backward is one product. C++ fuses them; PyTorch takes three
times as long in fp32 tiles that stay in cache.

Squared ReLU keeps only its output for the backward, as the reference does. PyTorch's root in fp32
is MKL's, which takes 50 times as long where half of the numbers are zero: 16 instead of 0.3 ms for
512 x 2048 on one core. Here no root of zero is taken. In bf16 C++ forms the gradient in one pass
over memory.
"""

import math
from typing import Any

import torch
from torch import Tensor

from megatron.kernels.autograd import once_differentiable
from megatron.kernels.cpu.library import Library, expect
from megatron.kernels.reference.activations import SquaredReLU

_TILE = 1 << 16  # elements: the four fp32 temporaries of a tile take a megabyte
_CUBIC = 0.044715
_SCALE = 2 * math.sqrt(2 / math.pi)


class TiledGelu(torch.autograd.Function):
    """GELU by its tanh approximation, in fp32 tiles.

    The forward saves the slope in place of the input. The slope takes as much memory as the input,
    and the backward is then a single multiplication.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Any shape and floating type; arithmetic is fp32 for bf16."""
        x = x.contiguous()
        value, slope = torch.empty_like(x), torch.empty_like(x)
        tiles = zip(*(t.view(-1).split(_TILE) for t in (x, value, slope)), strict=True)
        for x_tile, value_tile, slope_tile in tiles:
            _value_and_slope(x_tile, value_tile, slope_tile)
        ctx.save_for_backward(slope)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Return the gradient times the slope."""
        slope: Tensor
        (slope,) = ctx.saved_tensors
        return grad * slope


def _value_and_slope(x: Tensor, value: Tensor, slope: Tensor) -> None:
    """Value x sigma(u) and slope sigma + x sigma (1 - sigma) u' of one tile, written in place.

    u = 2 sqrt(2/pi) (x + 0.044715 x^3), since (1 + tanh(u/2)) / 2 = sigma(u).
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    square = wide * wide
    sigma = (square * (_SCALE * _CUBIC)).add_(_SCALE).mul_(wide).sigmoid_()
    product = wide * sigma
    value.copy_(product)
    inner_slope = square.mul_(3 * _SCALE * _CUBIC).add_(_SCALE)
    product.addcmul_(product, sigma, value=-1)
    slope.copy_(sigma.addcmul_(product, inner_slope))


class PositiveSquaredReLU(SquaredReLU):
    """``SquaredReLU`` that takes roots of positive numbers only."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """``2 relu(x) grad``."""
        (out,) = ctx.saved_tensors
        product = out.clamp_min(torch.finfo(out.dtype).tiny).sqrt_().mul_(grad).mul_(2)
        x_grad: Tensor = torch.ops.aten.threshold_backward(product, out, 0)  # zero at zeros
        return x_grad


class CompiledActivation(torch.autograd.Function):
    """``TiledGelu`` or ``SquaredReLU`` for bf16 in C++, with arithmetic in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, library: Library, gelu: bool) -> Tensor:
        """Any shape, bf16."""
        x = x.contiguous()
        expect(torch.bfloat16, x)
        out = kept = torch.empty_like(x)
        if gelu:
            kept = torch.empty_like(x)  # the slope
            library.gelu_bf16(x.data_ptr(), x.numel(), out.data_ptr(), kept.data_ptr())
        else:
            library.squared_relu_bf16(x.data_ptr(), x.numel(), out.data_ptr())
        ctx.kernel = library.multiply_bf16 if gelu else library.squared_relu_backward_bf16
        ctx.save_for_backward(kept)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient times the slope, which was kept or follows from the kept output."""
        (kept,) = ctx.saved_tensors
        grad, x_grad = grad.contiguous(), torch.empty_like(kept)
        expect(torch.bfloat16, grad, kept)
        ctx.kernel(grad.data_ptr(), kept.data_ptr(), kept.numel(), x_grad.data_ptr())
        return x_grad, None, None
