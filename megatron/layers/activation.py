"""GELU by its tanh approximation, at the speed of memory on CPU as well.

PyTorch's bf16 kernel on CPU evaluates a slow tanh in the forward and again in the backward: 4.7 ms
for 512 x 2048 on one core, as long as four matrix products of that layer. Here value and slope come
from one sigmoid, and the backward is one product: fused in C++ or, in three times as long, PyTorch
in fp32 tiles that stay in cache.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from megatron.layers.cpu_library import library_for

_TILE = 1 << 16  # elements: the four fp32 temporaries of a tile take a megabyte
_CUBIC = 0.044715
_SCALE = 2 * math.sqrt(2 / math.pi)


def gelu(x: Tensor) -> Tensor:
    """``x / 2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))``, the GELU of Megatron's MLP.

    Args:
        x: any shape, any floating type.

    Returns:
        A tensor of the shape and type of ``x``; arithmetic is fp32 for bf16 inputs.
    """
    if x.device.type == "cpu":
        return _CpuGelu.apply(x)
    return functional.gelu(x, approximate="tanh")


def swiglu(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of the two halves of the last dimension, the gate first."""
    return _SwiGLU.apply(gate_up)


class _SwiGLU(torch.autograd.Function):
    """Keeps its input only: ``silu(gate)`` is formed again in the backward, to the same bits."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        gate_up_grad = torch.empty_like(gate_up)
        gate_grad, up_grad = gate_up_grad.chunk(2, dim=-1)
        torch.mul(functional.silu(gate), grad, out=up_grad)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=gate_grad)
        return gate_up_grad


class _CpuGelu(torch.autograd.Function):
    """Saves the slope instead of the input: as much memory, and the backward only multiplies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        value, slope = torch.empty_like(x), torch.empty_like(x)
        library = library_for(x)
        if library is not None:
            library.gelu_bf16(x.data_ptr(), x.numel(), value.data_ptr(), slope.data_ptr())
        else:
            tiles = zip(*(t.view(-1).split(_TILE) for t in (x, value, slope)), strict=True)
            for x_tile, value_tile, slope_tile in tiles:
                _value_and_slope(x_tile, value_tile, slope_tile)
        ctx.save_for_backward(slope)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (slope,) = ctx.saved_tensors
        library = library_for(grad)
        if library is None:
            return grad * slope
        grad, x_grad = grad.contiguous(), torch.empty_like(slope)
        library.multiply_bf16(grad.data_ptr(), slope.data_ptr(), grad.numel(), x_grad.data_ptr())
        return x_grad


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
