"""LayerNorm on a CPU, with sums in a wider type than the input's.

PyTorch's CPU kernel adds up the gradients of weight and bias, row after row, in the input's type.
In bf16 they are 2.5 % off over 512 rows; rounding alone would cost 0.17 %. The kernel takes 0.32 ms
for forward and backward of [512, 512], C++ takes 0.14 ms. In fp32 the gradients are 1.8e-6 off over
4000 rows, and 1e-7 is possible. On a CPU, fp32 serves to compare runs to the last digits, so the
accuracy is worth 0.7 ms instead of 0.2 ms.

Shapes: ``...`` any leading dimensions, h the normalised one.
"""

from typing import Any

import torch
from torch import Tensor

from megatron.kernels.autograd import once_differentiable
from megatron.kernels.cpu.library import Library, expect


class CompiledLayerNorm(torch.autograd.Function):
    """LayerNorm of bf16 in C++, with sums in fp32."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_h: Tensor,
        bias_h: Tensor,
        epsilon: float,
        library: Library,
    ) -> Tensor:
        """[..., h] -> [..., h]."""
        x = x.contiguous()
        expect(torch.bfloat16, x, weight_h, bias_h)
        out, statistics = torch.empty_like(x), x.new_empty((2, *x.shape[:-1]), dtype=torch.float32)
        pointers = (t.data_ptr() for t in (x, weight_h, bias_h))
        results = (t.data_ptr() for t in (out, *statistics))
        h = x.shape[-1]
        library.layer_norm_bf16(*pointers, x.numel() // h, h, epsilon, *results)
        ctx.library = library
        ctx.save_for_backward(x, weight_h, statistics)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of input, weight and bias."""
        x, weight_h, statistics = ctx.saved_tensors
        grad, h = grad.contiguous(), x.shape[-1]
        expect(torch.bfloat16, grad)
        gradients = [torch.empty_like(t) for t in (x, weight_h, weight_h)]
        pointers = (t.data_ptr() for t in (grad, x, weight_h, *statistics))
        results = (t.data_ptr() for t in gradients)
        ctx.library.layer_norm_backward_bf16(*pointers, x.numel() // h, h, *results)
        return (*gradients, None, None)


class WideLayerNorm(torch.autograd.Function):
    """Computes in float64 between fp32 inputs and outputs; saves the fp32 input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_h: Tensor, bias_h: Tensor, epsilon: float) -> Tensor:
        """[..., h] -> [..., h]."""
        out, mean, inverse_deviation = torch.native_layer_norm(
            x.double(), weight_h.shape, weight_h.double(), bias_h.double(), epsilon
        )
        ctx.save_for_backward(x, weight_h, bias_h, mean, inverse_deviation)
        return out.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of input, weight and bias, as far as they are needed."""
        x, weight_h, bias_h, mean, inverse_deviation = ctx.saved_tensors
        wide = torch.ops.aten.native_layer_norm_backward(
            grad.double(),
            x.double(),
            weight_h.shape,
            mean,
            inverse_deviation,
            weight_h.double(),
            bias_h.double(),
            ctx.needs_input_grad[:3],
        )
        narrow = (None if t is None else t.to(x.dtype) for t in wide)
        return (*narrow, None)
