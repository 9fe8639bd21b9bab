"""Causal attention for ranks that share every sequence: queries of one rank, keys of all ranks.

One collective gathers keys and values of all ranks. The backward reduce-scatters their gradients. A
rank has two chunks of queries. A chunk sees the sequence up to the chunk's own end, as in ordinary
causal attention, so each chunk is one call of the kernels without a special mask.

Shapes: b batch, s sequence, u tokens of a rank, a query heads, g key/value heads, d channels of a
head; 2: keys and values.
"""

from typing import Any

import torch
from torch import Tensor

from megatron.kernels.autograd import apply_all, once_differentiable
from megatron.kernels.documents import Documents
from megatron.kernels.face import Kernels
from megatron.kernels.scores import Scores
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
    """
    seen = apply_all(_Seen, torch.stack((k_bugd, v_bugd)), context)
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
