"""Causal attention for ranks that share every sequence and gather each other's keys and values.

One collective gathers keys and values of all ranks. The backward reduce-scatters their gradients. A
rank has two chunks of queries. A chunk sees the sequence up to the chunk's own end, as in ordinary
causal attention, so each chunk is one call of the kernels without a special mask.

If microbatches are cut into slices, ranks share every slice as they share whole sequences, and keep
all earlier keys. So only the slice itself is gathered, and the bytes do not depend on the number of
slices. A rank's gradients of earlier keys wait, unsummed, for the backward of the slice that has
these keys.

Shapes: b batch, s sequence, u tokens of a rank, a query heads, g key/value heads, d channels of a
head; 2: keys and values.
"""

from typing import Any

import torch
from torch import Tensor

from megatron.kernels.autograd import apply, apply_all, once_differentiable
from megatron.kernels.heads import alone
from megatron.layers.attention_call import AttentionCall, Heads
from megatron.layers.slice_attention import seen_keys
from megatron.layers.slices import SequenceSlice, SlicedPass
from megatron.parallel.context import ContextParallel, chunks_of


def gathered_attention(
    context: ContextParallel, heads: Heads, call: AttentionCall
) -> tuple[Tensor, ...]:
    """Return attention as ``context_attention`` does, one part for each chunk."""
    q_buad, k_bugd, v_bugd = heads
    own_2bugd = torch.stack((k_bugd, v_bugd))
    if call.sliced is None:
        seen = apply_all(_Seen, own_2bugd, context)
    else:
        seen = _seen_in_slice(context, own_2bugd, call.sliced, call.layer, call.window)
        q_buad = alone(q_buad)
    chunks = zip(q_buad.chunk(2, dim=1), seen[::2], seen[1::2], strict=True)
    return tuple(call.seen(*chunk) for chunk in chunks)


def _seen_in_slice(
    context: ContextParallel,
    own_2bugd: Tensor,
    sliced: SlicedPass,
    layer: int,
    window: int | None,
) -> tuple[Tensor, ...]:
    """Return keys and values that this rank's first chunk of a slice sees, then its second chunk's.

    Args:
        context: the ranks that share the slice.
        own_2bugd: keys and values of this rank's tokens.
        sliced: the slice.
        layer: index of the layer in the whole model.
        window: as for ``seen_keys``.
    """
    part = sliced.part
    size = (part.end - part.first) // (2 * context.size)
    chunks = [
        SequenceSlice(part.first + number * size, part.first + (number + 1) * size, part.length)
        for number in chunks_of(context.rank, context.size)
    ]
    k_bsgd, v_bsgd = apply(_Gathered, own_2bugd, context).unbind()
    return seen_keys(sliced, layer, (k_bsgd, v_bsgd), chunks, window)


class _Seen(torch.autograd.Function):
    """Turns a rank's keys and values into the keys and values that its query chunks see."""

    @staticmethod
    def forward(ctx: Any, own_2bugd: Tensor, context: ContextParallel) -> tuple[Tensor, ...]:
        """Return keys and values up to the first chunk's end, then up to the second chunk's."""
        ctx.context = context
        all_2bsgd = context.gather(own_2bugd)
        ctx.shape, chunk = all_2bsgd.shape, all_2bsgd.shape[2] // (2 * context.size)
        return tuple(
            one_bsgd[:, : (number + 1) * chunk]
            for number in chunks_of(context.rank, context.size)
            for one_bsgd in all_2bsgd
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Sum the gradients of this rank's keys and values over both chunks of all ranks."""
        total_2bsgd = gradients[0].new_zeros(ctx.shape)
        for number, grad_bsgd in enumerate(gradients):
            # ``+=`` on an index would also copy the sum onto itself.
            total_2bsgd[number % 2, :, : grad_bsgd.shape[1]].add_(grad_bsgd)
        return ctx.context.reduce(total_2bsgd), None


class _Gathered(torch.autograd.Function):
    """Turns a rank's keys and values of a slice into those of all its tokens."""

    @staticmethod
    def forward(ctx: Any, own_2bugd: Tensor, context: ContextParallel) -> Tensor:
        ctx.context = context
        return context.gather(own_2bugd)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_2bsgd: Tensor) -> tuple[Tensor, None]:
        return ctx.context.reduce(grad_2bsgd), None
