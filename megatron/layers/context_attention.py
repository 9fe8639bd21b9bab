"""Causal attention for ranks that share every sequence, in one of four ways.

``all_gather``: one collective gathers keys and values of all ranks. The backward reduce-scatters
their gradients. A rank has two chunks of queries. A chunk sees the sequence up to the chunk's own
end, as in ordinary causal attention, so each chunk is one call of the kernels without a special
mask.

``p2p``: keys and values pass along a ring (``ring_attention``).

``a2a``: one collective gives every rank queries, keys and values of all tokens for its share of the
heads, and a second one gives the results back. In between stands ordinary causal attention.

``a2a+p2p``: ranks exchange heads with their neighbours, and so have the tokens of all of these, two
longer chunks of the sequence. In between stands attention along a ring.

If microbatches are cut into slices, ranks share every slice as they share whole sequences. Then
``a2a`` keeps a rank's heads of earlier keys, and ``all_gather`` keeps all earlier keys. So only the
slice itself is exchanged, and the bytes do not depend on the number of slices. A rank's gradients
of earlier keys wait, unsummed, for the backward of the slice that has these keys.

Shapes: b batch, s sequence, u tokens of a rank, a query heads, g key/value heads, d channels of a
head; 2: keys and values.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.kernels.autograd import apply, apply_all, once_differentiable
from megatron.kernels.documents import Documents
from megatron.kernels.face import Kernels
from megatron.kernels.scores import Scores
from megatron.layers.ring_attention import Heads, ring_attention
from megatron.layers.slice_attention import alone, attention_of_all_tokens, seen_keys
from megatron.layers.slices import SequenceSlice, SlicedPass
from megatron.parallel.context import ContextParallel, chunks_of


def context_attention(
    kernels: Kernels,
    context: ContextParallel,
    q_buad: Tensor,
    k_bugd: Tensor,
    v_bugd: Tensor,
    *,
    dropout: float,
    scores: Scores,
    documents: Documents | None,
    sinks_a: Tensor | None = None,
    sliced: SlicedPass | None = None,
    layer: int = -1,
) -> Tensor:
    """Return ``causal_attention`` of this rank's queries, [b, u, a, d].

    Args:
        kernels: compute attention.
        context: the ranks that share the sequences.
        q_buad: queries of this rank's tokens, rotated by the tokens' true positions.
        k_bugd: keys of this rank's tokens, rotated in the same way.
        v_bugd: values of this rank's tokens.
        dropout: see ``Kernels.causal_attention``; the mask depends on the number of ranks.
        scores: see ``Kernels.causal_attention``.
        documents: of whole samples; see ``Kernels.causal_attention``.
        sinks_a: see ``Kernels.causal_attention``.
        sliced: the slice that the tokens are in; ``None``: they are in whole samples.
        layer: index of the layer in the whole model, for slices.
    """
    own = q_buad, k_bugd, v_bugd
    assert sliced is None or context.exchange in ("all_gather", "a2a"), "config refuses rings"
    if context.exchange == "p2p":
        assert not dropout, "config refuses dropout"
        return ring_attention(kernels, context, own, scores, documents, sinks_a)
    if context.levels is not None:
        assert not dropout, "config refuses dropout"
        heads, ring = context.levels
        return _of_own_heads(
            heads,
            own,
            scores,
            sinks_a,
            lambda all_, scores, sinks: ring_attention(
                kernels, ring, all_, scores, documents, sinks
            ),
        )
    if context.exchange == "a2a":
        return _of_own_heads(
            context,
            own,
            scores,
            sinks_a,
            lambda all_, scores, sinks: attention_of_all_tokens(
                kernels,
                sliced,
                layer,
                all_,
                dropout=dropout,
                scores=scores,
                documents=documents,
                sinks_a=sinks,
            ),
        )
    if sliced is None:
        seen = apply_all(_Seen, torch.stack((k_bugd, v_bugd)), context)
    else:
        window = None if documents else scores.window
        seen = _seen_in_slice(context, (k_bugd, v_bugd), sliced, layer, window)
        q_buad = alone(q_buad)
    parts = [
        kernels.causal_attention(
            q_bkad.transpose(1, 2),
            k_bsgd.transpose(1, 2),
            v_bsgd.transpose(1, 2),
            dropout=dropout,
            scores=scores,
            documents=documents,
            sinks_a=sinks_a,
        ).transpose(1, 2)
        for q_bkad, k_bsgd, v_bsgd in zip(
            q_buad.chunk(2, dim=1), seen[::2], seen[1::2], strict=True
        )
    ]
    return torch.cat(parts, dim=1)


def _seen_in_slice(
    context: ContextParallel,
    own: tuple[Tensor, Tensor],
    sliced: SlicedPass,
    layer: int,
    window: int | None,
) -> tuple[Tensor, ...]:
    """Return keys and values that this rank's first chunk of a slice sees, then its second chunk's.

    Args:
        context: the ranks that share the slice.
        own: keys and values of this rank's tokens, [b, u, g, d].
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
    k_bugd, v_bugd = apply(_Gathered, torch.stack(own), context).unbind()
    return seen_keys(sliced, layer, (k_bugd, v_bugd), chunks, window)


def _of_own_heads(
    context: ContextParallel,
    own: Heads,
    scores: Scores,
    sinks_a: Tensor | None,
    attend: Callable[[Heads, Scores, Tensor | None], Tensor],
) -> Tensor:
    """Exchange heads for tokens, compute attention, and exchange its output back.

    Args:
        context: the ranks that exchange heads.
        own: queries, keys and values of all heads of this rank's tokens.
        scores: of all heads.
        sinks_a: of all heads.
        attend: returns the attention of some heads, given their queries, keys and values, scores
            and sinks.
    """
    q, k, v = apply_all(_Exchanged, context, True, *own)
    share = q.shape[2]
    first = context.rank * share
    sinks = None if sinks_a is None else sinks_a[first : first + share]
    y_bsad = attend((q, k, v), scores.of_heads(first, share), sinks)
    [y_buad] = apply_all(_Exchanged, context, False, y_bsad)
    return y_buad


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
            total_2bsgd[number % 2, :, : grad_bsgd.shape[1]] += grad_bsgd
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
