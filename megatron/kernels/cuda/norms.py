"""Norms on a GPU: one kernel forward, which also adds a branch to the stream, and two backward.

The gradients of weight and bias are added up over spans of rows, and then over the spans in order.
No order of additions is left to chance, so the same run gives the same bits.

Shapes: r rows, h their length, k spans of rows, j sums side by side: of weight and, if any, bias.
"""

from typing import Any

import torch
from torch import Tensor

from megatron.kernels.autograd import once_differentiable
from megatron.kernels.cuda import row_operators as operators
from megatron.kernels.cuda.row_operators import as_rows
from megatron.kernels.cuda.sizes import quotient


class Norm(torch.autograd.Function):
    """``sum = x + part`` and its LayerNorm, or without a bias its RMSNorm.

    Without a part the sum is ``x`` itself. One kernel forms the gradient of the norm's input and
    adds the gradient of the sum's other use.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        part: Tensor | None,
        weight_h: Tensor,
        bias_h: Tensor | None,
        epsilon: float,
    ) -> tuple[Tensor, Tensor]:
        """[..., h] -> the sum and its norm, both [..., h], in the type of ``x``."""
        ctx.set_materialize_grads(False)
        x_rh = as_rows(x)
        out = x.new_empty(x.shape)
        total = x.view_as(x) if part is None else torch.empty_like(out)
        statistics_2r = x.new_empty(2, x_rh.shape[0], dtype=torch.float32)
        operators.norm(
            out,
            None if part is None else total,
            statistics_2r,
            x_rh,
            None if part is None else part.contiguous(),
            weight_h.contiguous(),
            None if bias_h is None else bias_h.contiguous(),
            epsilon,
        )
        ctx.save_for_backward(total, weight_h, statistics_2r)
        ctx.part_dtype = None if part is None else part.dtype
        ctx.has_bias = bias_h is not None
        return total, out

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, stream_grad: Tensor | None, grad: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Gradients of input, part, weight and bias."""
        total, weight_h, statistics_2r = ctx.saved_tensors
        grad = torch.zeros_like(total) if grad is None else grad
        x_grad, weight_grad_h, bias_grad_h = norm_backward(
            total, weight_h, statistics_2r, grad, stream_grad, has_bias=ctx.has_bias
        )
        part_grad = None if ctx.part_dtype is None else x_grad.to(ctx.part_dtype)
        return x_grad, part_grad, weight_grad_h, bias_grad_h, None


def norm_backward(
    x: Tensor,
    weight_h: Tensor,
    statistics_2r: Tensor,
    grad: Tensor,
    stream_grad: Tensor | None,
    *,
    has_bias: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of x, weight and bias.

    Args:
        x: input of the norm [..., h].
        weight_h: weight of the norm.
        statistics_2r: means, which are not read for an RMSNorm, and inverse deviations of the rows.
        grad: gradient of the norm's output [..., h].
        stream_grad: gradient of ``x`` from its other use; ``None``: no other use.
        has_bias: whether the norm is a LayerNorm; otherwise it is an RMSNorm.
    """
    x_rh = as_rows(x)
    r, h = x_rh.shape
    x_grad = x.new_empty(x.shape)
    spans = quotient(r, operators.norm_span(r, h))
    partial_jkh = statistics_2r.new_empty(1 + has_bias, spans, h)
    operators.norm_backward(
        x_grad,
        partial_jkh,
        x_rh,
        weight_h.contiguous(),
        statistics_2r,
        grad.contiguous(),
        None if stream_grad is None else stream_grad.contiguous(),
    )
    sums_jh = weight_h.new_empty(1 + has_bias, h)
    operators.column_sums(sums_jh, partial_jkh)
    scale_grad_h, *bias_grad_h = sums_jh.unbind()
    return x_grad, scale_grad_h, bias_grad_h[0] if has_bias else None
