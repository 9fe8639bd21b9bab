"""A product in fp32 of narrower factors, which keeps the factors as they are.

Autograd would keep a copy of the input in fp32, twice as large as the input, until the backward.

Shapes: ``...`` any leading dimensions, n their product, i input features, o output features.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megatron.kernels.autograd import apply, once_differentiable
from megatron.kernels.face import Kernels
from megatron.layers.products import rows


def wide_linear(x: Tensor, weight_oi: Tensor, dtype: torch.dtype, kernels: Kernels) -> Tensor:
    """Return ``x @ weight.T`` in a type that is at least as wide as the factors' types.

    Gradients are products in this type too, and are rounded to the types of their factors.

    Args:
        x: [..., i].
        weight_oi: the matrix.
        dtype: of the product.
        kernels: of the layer.
    """
    if x.dtype == weight_oi.dtype == dtype:
        return functional.linear(x, weight_oi)
    return apply(_WideLinear, x, weight_oi, dtype, kernels)


class _WideLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_oi: Tensor, dtype: torch.dtype, kernels: Kernels
    ) -> Tensor:
        ctx.save_for_backward(x, weight_oi)
        return kernels.wide_product(rows(x), weight_oi, dtype).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_oi = ctx.saved_tensors
        x_grad = weight_grad_oi = None
        if ctx.needs_input_grad[0]:
            x_grad = (grad @ weight_oi.to(grad.dtype)).to(x.dtype)
        if ctx.needs_input_grad[1]:
            weight_grad_oi = (rows(grad).T @ rows(x).to(grad.dtype)).to(weight_oi.dtype)
        return x_grad, weight_grad_oi, None, None
