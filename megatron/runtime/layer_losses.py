"""Losses that layers, such as routers of experts, add to the loss of an iteration.

A layer's loss is a mean over tokens. In the sum over microbatches, each microbatch is weighted by
its number of tokens that count, as for multi-token prediction (``DeviceMicrobatch.mean_weight``).
At the end of an iteration all losses can therefore be scaled by the same factor.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.parallel.tensor import TensorParallel
from megatron.runtime.batch import DeviceMicrobatch


@dataclass(frozen=True)
class Source:
    """A result of a stage from which its backward begins: the output, or a layer's loss.

    Attributes:
        edge: the result's gradient edge in the graph.
        gradient: of the loss of the iteration with respect to the result.
    """

    edge: GradientEdge
    gradient: Tensor


class JoinedLosses:
    """The losses of one rank's layers, iteration by iteration.

    Args:
        tensor: the ranks that share the layers. If each has tokens of its own, each has a part of
            the mean; otherwise all have the same mean, and only the first rank reports it.
    """

    def __init__(self, tensor: TensorParallel) -> None:
        self._parts = tensor.sequence_parts
        self._tells = self._parts > 1 or tensor.rank == 0
        self._batch: Sequence[DeviceMicrobatch] = ()
        self._sums: dict[tuple[int, int], Tensor] = {}

    def begin(self, batch: Sequence[DeviceMicrobatch]) -> None:
        """Start an iteration over ``batch``."""
        self._batch, self._sums = batch, {}

    def join(self, i: int, chunk: int, losses: Sequence[Tensor]) -> tuple[Source, ...]:
        """Add the losses of a chunk's layers in microbatch ``i`` to the loss of the iteration.

        Returns:
            The losses as further starting points of the backward, besides the stage's output.
        """
        if not losses:
            return ()
        weight = self._batch[i].mean_weight / self._parts
        if self._tells:
            wide = self._batch[i].weight_n.dtype
            self._sums[i, chunk] = torch.stack([each.detach().to(wide) for each in losses]).sum()
            self._sums[i, chunk] *= weight
        return tuple(
            Source(get_gradient_edge(loss), torch.full_like(loss, weight))
            for loss in losses
            if loss.requires_grad
        )

    def add_to_(self, sums: Tensor) -> None:
        """Add the layers' losses of this iteration to ``sums[0]``, the iteration's loss."""
        for place in sorted(self._sums):
            sums[0] += self._sums[place]
