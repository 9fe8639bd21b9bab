"""A norm whose result is directly a *factor*: the form of its input that a linear layer multiplies.

The factor may be in 8 bits, for example. The norm in 16 bits is then neither written nor read. The
linear layer gets the factor, and a placeholder of the norm's shape for autograd. In the backward
one kernel adds the norm's gradient to the gradient of the residual stream.

Shapes: ``...`` any leading dimensions, n their product, h hidden.
"""

from typing import Any

import torch
from torch import Tensor, nn

from megatron.kernels.autograd import apply_all, once_differentiable
from megatron.layers.linear import FactoredInput, Linear, LinearInput
from megatron.layers.norm import Formula, LayerNorm, RMSNorm
from megatron.layers.products import FormsNorm


def reader_of(part: nn.Module | None) -> Linear | None:
    """Return the linear layer that alone reads the input of a part, if there is one.

    A part names this layer by an attribute ``reader``. (A protocol that is checked at run time
    would take the host longer than a linear layer.)

    Args:
        part: attention, an MLP or a part in its place; ``None``: several parts read the input.
    """
    reader = getattr(part, "reader", None)
    assert reader is None or isinstance(reader, Linear), f"{reader} is no linear layer"
    return reader


def read_norm(
    reader: Linear, norm: LayerNorm | RMSNorm, x: Tensor, part: Tensor | None
) -> tuple[Tensor, LinearInput]:
    """Return ``x + part``, or without a part ``x``, and its norm for one linear layer.

    Args:
        reader: the only layer that reads the norm.
        norm: of the residual stream.
        x: the stream [..., h].
        part: output of a branch, to add to the stream.
    """
    form = reader.products.of_norm(x, reader.columns)
    if form is None or not (formula := norm.formula()).fits(x):
        return norm.add(x, part)
    total, found = x if part is None else x + part, list[Any]()
    stream, placeholder = apply_all(
        _NormedInput, total, formula.scale_h, formula.bias_h, formula, form, found
    )
    factor, kept = found
    return stream, FactoredInput(placeholder, factor, kept, reader.products)


class _NormedInput(torch.autograd.Function):
    """Returns the residual stream unchanged, and a placeholder for its norm."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scale_h: Tensor,
        bias_h: Tensor | None,
        formula: Formula,
        form: FormsNorm[Any],
        found: list[Any],
    ) -> tuple[Tensor, Tensor]:
        """Put the factor, and the tensors to keep for W, into ``found``."""
        # So a norm that nobody has read has no gradient in the backward, where zeros would cost a
        # kernel.
        ctx.set_materialize_grads(False)
        normed = form(x, scale_h, bias_h, formula.epsilon)
        ctx.save_for_backward(x, scale_h, normed.mean_n, normed.inverse_n)
        ctx.kernels = formula.kernels
        found += normed.factor, normed.kept
        return x.view_as(x), x.new_empty(()).expand(x.shape)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, stream_grad: Tensor | None, grad: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        x, scale_h, mean_n, inverse_n = ctx.saved_tensors
        if grad is None:
            return stream_grad, None, None, None, None, None
        x_grad, scale_grad_h, bias_grad_h = ctx.kernels.norm_backward(
            x.contiguous(), scale_h, mean_n, inverse_n, grad, stream_grad
        )
        return x_grad, scale_grad_h, bias_grad_h, None, None, None
