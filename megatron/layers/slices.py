"""Slices of a microbatch: samples are cut along the sequence, and each slice has passes of its own.

The queries of a slice see the keys and values of earlier slices (arXiv 2406.03488). A stage keeps
these for every microbatch, in one buffer per layer that the slices fill one after the other. The
backward runs in descending order. A slice's backward has the gradients of all keys that its queries
see: it returns those of its own keys, together with the summands that later slices have left, and
leaves the others to earlier slices.

Shapes: b batch, s tokens of a sample, u tokens of the slice, z keys that the slice sees, a query
heads, g key/value heads, d channels of a head.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from megatron.kernels.autograd import apply_all, once_differentiable
from megatron.kernels.documents import Documents
from megatron.kernels.face import Kernels
from megatron.kernels.scores import Scores
from megatron.kernels.softmax import statistics_dtype


@dataclass(frozen=True)
class SequenceSlice:
    """The place of a slice in every sample of its microbatch.

    Attributes:
        first: position of the slice's first token.
        end: position after its last token.
        length: tokens of a sample.
    """

    first: int
    end: int
    length: int

    @classmethod
    def of_lengths(cls, lengths: Sequence[int]) -> "tuple[SequenceSlice, ...]":
        """Return slices of the given lengths, in the order of the sequence."""
        bounds = list(accumulate(lengths, initial=0))
        return tuple(cls(first, end, bounds[-1]) for first, end in pairwise(bounds))

    def share(self, tokens: int) -> int:
        """Return how many of ``tokens`` are in the slice, if they are a part of every position."""
        assert tokens * (self.end - self.first) % self.length == 0, (self, tokens)
        return tokens * (self.end - self.first) // self.length


class SeenKeys:
    """Keys and values of the slices of one microbatch so far, in the layers of one stage.

    While the backward runs, it also holds the gradients that later slices have left for keys and
    values of earlier ones. Their sums are statistics, so that each is rounded once.
    """

    def __init__(self) -> None:
        self._both_2bsgd: dict[int, Tensor] = {}
        self._left_2bsgd: dict[int, Tensor] = {}

    def buffers(self) -> Iterable[Tensor]:
        """Return the buffers of keys and values, one for every layer that has made some."""
        return self._both_2bsgd.values()

    def extend(self, layer: int, part: SequenceSlice, k_bugd: Tensor, v_bugd: Tensor) -> Tensor:
        """Put a slice's keys and values behind earlier ones; return all so far, [2, b, z, g, d].

        A layer that is computed again for its backward puts the same values there again.

        ``.data`` has a version of its own, so autograd does not take a later slice's part for a
        change of the parts that it has kept. No slice writes to another one's part.
        """
        if layer not in self._both_2bsgd:
            b, _, g, d = k_bugd.shape
            self._both_2bsgd[layer] = k_bugd.new_empty(2, b, part.length, g, d)
        buffer_2bsgd = self._both_2bsgd[layer].data
        for own_bsgd, made_bugd in zip(buffer_2bsgd, (k_bugd, v_bugd), strict=True):
            own_bsgd[:, part.first : part.end] = made_bugd
        return buffer_2bsgd[:, :, : part.end]

    def settle(
        self, layer: int, part: SequenceSlice, grads: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, ...]:
        """Return the gradients of a slice's own keys and values; leave those of earlier ones.

        Args:
            layer: index of the layer.
            part: the slice; all later slices have been here.
            grads: gradients of the last keys and of the last values that the slice sees, [b, z, g,
                d]; keys before them have none.
        """
        own, earlier = [], []
        for grad_bzgd in grads:
            seen = grad_bzgd.shape[1] - (part.end - part.first)
            own.append(grad_bzgd[:, seen:])
            earlier.append(grad_bzgd[:, :seen])
        left_2bsgd = self._left_2bsgd.pop(layer, None)
        if left_2bsgd is not None:
            of_slice = left_2bsgd[:, :, part.first : part.end]
            own = [(later + mine).to(mine.dtype) for mine, later in zip(own, of_slice, strict=True)]
        if part.first == 0:
            return tuple(own)
        if left_2bsgd is None:
            b, _, g, d = grads[0].shape
            wide = statistics_dtype(grads[0].dtype)
            left_2bsgd = grads[0].new_zeros(2, b, part.first, g, d, dtype=wide)
        for left_bsgd, grad_bsgd in zip(left_2bsgd, earlier, strict=True):
            left_bsgd[:, part.first - grad_bsgd.shape[1] : part.first] += grad_bsgd
        self._left_2bsgd[layer] = left_2bsgd
        return tuple(own)


@dataclass(frozen=True)
class SlicedPass:
    """The slice of a pass, and the keys that it sees.

    Attributes:
        part: the slice.
        seen: keys and values of the same microbatch, in the layers of the same stage.
    """

    part: SequenceSlice
    seen: SeenKeys


def slice_attention(
    kernels: Kernels,
    sliced: SlicedPass,
    layer: int,
    q_buad: Tensor,
    k_bugd: Tensor,
    v_bugd: Tensor,
    *,
    dropout: float,
    scores: Scores,
    documents: Documents | None,
    sinks_a: Tensor | None = None,
) -> Tensor:
    """Return ``causal_attention`` of a slice's queries, [b, u, a, d].

    Args:
        kernels: compute attention.
        sliced: the slice, and the keys of earlier slices, to which the slice's own are added.
        layer: index of the layer in the whole model.
        q_buad: queries of the slice, rotated by the tokens' true positions.
        k_bugd: keys of the slice, rotated in the same way.
        v_bugd: values of the slice.
        dropout: see ``Kernels.causal_attention``; the mask depends on the slices.
        scores: see ``Kernels.causal_attention``.
        documents: of whole samples; see ``Kernels.causal_attention``.
        sinks_a: see ``Kernels.causal_attention``.
    """
    first_key = 0
    if scores.window is not None and documents is None:
        first_key = max(0, sliced.part.first - scores.window)
    k_bzgd, v_bzgd = apply_all(_Seen, k_bugd, v_bugd, sliced, layer, first_key)
    if q_buad.untyped_storage().nbytes() > q_buad.nbytes:
        q_buad = q_buad.clone()  # a view would keep the slice's keys and values a second time
    return kernels.causal_attention(
        q_buad.transpose(1, 2),
        k_bzgd.transpose(1, 2),
        v_bzgd.transpose(1, 2),
        dropout=dropout,
        scores=scores,
        documents=documents,
        sinks_a=sinks_a,
    ).transpose(1, 2)


class _Seen(torch.autograd.Function):
    """Turns a slice's keys and values into all that its queries see, from ``first_key`` on.

    Documents count positions from the start of a sample, so they need all keys. Attention reads
    only those that it sees.
    """

    @staticmethod
    def forward(
        ctx: Any, k_bugd: Tensor, v_bugd: Tensor, sliced: SlicedPass, layer: int, first_key: int
    ) -> tuple[Tensor, ...]:
        ctx.sliced, ctx.layer = sliced, layer
        both_2bzgd = sliced.seen.extend(layer, sliced.part, k_bugd, v_bugd)
        return tuple(own_bsgd[:, first_key:] for own_bsgd in both_2bzgd)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, k_grad: Tensor, v_grad: Tensor) -> tuple[Tensor | None, ...]:
        sliced: SlicedPass = ctx.sliced
        own = sliced.seen.settle(ctx.layer, sliced.part, (k_grad, v_grad))
        return *own, None, None, None
