"""The keys that attention of a slice sees: its own, and those of earlier slices of its microbatch.

Shapes: b batch, u tokens of the slice, z keys that the slice sees, a query heads, g key/value
heads, d channels of a head.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.kernels.autograd import apply_all, once_differentiable
from megatron.layers.slices import SequenceSlice, SlicedPass


def seen_keys(
    sliced: SlicedPass,
    layer: int,
    own: Sequence[Tensor],
    parts: Sequence[SequenceSlice],
    window: int | None,
) -> tuple[Tensor, ...]:
    """Return the keys and the values that each of some parts of a slice sees, [b, z, g, d].

    Args:
        sliced: the slice, and the keys of earlier slices, to which the slice's own are added.
        layer: index of the layer in the whole model.
        own: keys and values of all tokens of the slice, [b, u, g, d].
        parts: of the slice, ascending; each sees the keys up to its own end.
        window: of every query; ``None``: no key is left out. Documents count positions from the
            start of a sample, so with them no key may be left out.
    """
    firsts = [0 if window is None else max(0, part.first - window) for part in parts]
    spans = [(first, part.end) for first, part in zip(firsts, parts, strict=True)]
    return apply_all(_SeenBySlice, *own, sliced, layer, spans)


class _SeenBySlice(torch.autograd.Function):
    """Turns a slice's keys and values into the spans of all keys so far that its queries see."""

    @staticmethod
    def forward(
        ctx: Any,
        k_bugd: Tensor,
        v_bugd: Tensor,
        sliced: SlicedPass,
        layer: int,
        spans: Sequence[tuple[int, int]],
    ) -> tuple[Tensor, ...]:
        ctx.sliced, ctx.layer, ctx.spans = sliced, layer, spans
        both_2bzgd = sliced.seen.extend(layer, sliced.part, k_bugd, v_bugd)
        return tuple(own_bzgd[:, first:end] for first, end in spans for own_bzgd in both_2bzgd)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        sliced: SlicedPass = ctx.sliced
        summed = _sum_of(gradients[::2], ctx), _sum_of(gradients[1::2], ctx)
        return *sliced.seen.settle(ctx.layer, sliced.part, summed), None, None, None


def _sum_of(gradients: Sequence[Tensor], ctx: Any) -> Tensor:
    """Return the sum of gradients of spans, [b, z, g, d], for all keys of the slice at least."""
    spans, part = ctx.spans, ctx.sliced.part
    start, end = min(spans[0][0], part.first), part.end
    if spans == [(start, end)]:
        return gradients[0]
    b, _, g, d = gradients[0].shape
    total_bzgd = gradients[0].new_zeros(b, end - start, g, d)
    for grad_bkgd, (first, behind) in zip(gradients, spans, strict=True):
        total_bzgd[:, first - start : behind - start].add_(grad_bkgd)
    return total_bzgd
