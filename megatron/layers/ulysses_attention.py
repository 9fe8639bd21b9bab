"""Causal attention for ranks that share every sequence and exchange heads for tokens.

One collective gives every rank queries, keys and values of all tokens for its share of the heads,
and a second one gives the results back (Ulysses, arXiv 2309.14509). In between the heads attend as
if no ranks shared the sequence. In two levels, ranks exchange heads with their neighbours, and so
have the tokens of all of these: two longer chunks of the sequence, which attend along a ring.

If microbatches are cut into slices, a rank keeps its heads of earlier keys, so that only the slice
itself is exchanged.

Shapes: b batch, s sequence, u tokens of a rank, a heads, d channels of a head.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.kernels.autograd import apply_all, once_differentiable
from megatron.layers.attention_call import AttentionCall, Heads
from megatron.layers.ring_attention import ring_attention
from megatron.parallel.context import ContextParallel


def ulysses_attention(
    context: ContextParallel, heads: Heads, call: AttentionCall
) -> tuple[Tensor, ...]:
    """Return attention as ``context_attention`` does."""
    return _of_own_heads(context, heads, call, lambda own, call: (call.of_all_tokens(own),))


def ulysses_ring_attention(
    context: ContextParallel, heads: Heads, call: AttentionCall
) -> tuple[Tensor, ...]:
    """Return attention as ``context_attention`` does, in two levels."""
    assert context.levels is not None, "the ranks share sequences in two levels"
    neighbours, ring = context.levels
    return _of_own_heads(neighbours, heads, call, partial(ring_attention, ring))


def _of_own_heads(
    context: ContextParallel,
    heads: Heads,
    call: AttentionCall,
    attend: Callable[[Heads, AttentionCall], tuple[Tensor, ...]],
) -> tuple[Tensor, ...]:
    """Exchange heads for tokens, compute attention, and exchange its output back.

    Args:
        context: the ranks that exchange heads.
        heads: all heads of this rank's tokens.
        call: how all heads attend.
        attend: returns the attention of some heads of all tokens, in one part.
    """
    q, k, v = apply_all(_Exchanged, context, True, *heads)
    share = q.shape[2]
    [y_bsad] = attend((q, k, v), call.of_heads(context.rank * share, share))
    return apply_all(_Exchanged, context, False, y_bsad)


class _Exchanged(torch.autograd.Function):
    """Heads for tokens, or tokens for heads; each is the backward of the other."""

    @staticmethod
    def forward(
        ctx: Any, context: ContextParallel, to_heads: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.context, ctx.to_heads = context, to_heads
        return tuple((context.to_heads if to_heads else context.to_tokens)(tensors))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        back = ctx.context.to_tokens if ctx.to_heads else ctx.context.to_heads
        return None, None, *back(gradients)
