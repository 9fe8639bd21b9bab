"""Causal attention where ranks share every sequence: each rank's queries meet the keys of all.

The ranks gather their keys and values, both in one collective, and reduce-scatter the gradients of
these in the backward. A rank has two chunks of queries. Each is the end of the part of the sequence
that it sees, so each is one call of the kernels, and no mask is made.

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
) -> Tensor:
    """Return ``causal_attention`` of this rank's queries, [b, u, a, d].

    Args:
        kernels: compute attention.
        context: the ranks that share the sequences.
        q_buad: queries of this rank's tokens.
        k_bugd: keys of them, rotated by their true positions.
        v_bugd: values of them.
        dropout: see ``Kernels.causal_attention``; what is dropped depends on the number of ranks.
        scores: as there.
        documents: of whole samples, as there.
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
        ).transpose(1, 2)
        for q_bkad, k_bsgd, v_bsgd in zip(
            q_buad.chunk(2, dim=1), seen[::2], seen[1::2], strict=True
        )
    ]
    return torch.cat(parts, dim=1)


class _Seen(torch.autograd.Function):
    """From a rank's keys and values to those that each of its chunks of queries sees."""

    @staticmethod
    def forward(ctx: Any, own_2bugd: Tensor, context: ContextParallel) -> tuple[Tensor, ...]:
        """Return keys and values up to the end of the first chunk, and to that of the second."""
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
        """Add up what both chunks of all ranks make of this rank's keys and values."""
        total_2bsgd = gradients[0].new_zeros(ctx.shape)
        for number, grad_bsgd in enumerate(gradients):
            total_2bsgd[number % 2, :, : grad_bsgd.shape[1]] += grad_bsgd
        return ctx.context.reduce(total_2bsgd), None
