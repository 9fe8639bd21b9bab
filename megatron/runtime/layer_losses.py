"""Losses that layers, such as routers of experts, have of their own, and the loads of experts.

A layer's loss is a mean over tokens. In the sum over microbatches, each microbatch is weighted by
its number of tokens that count, as for multi-token prediction (``DeviceMicrobatch.mean_weight``).
At the end of an iteration all losses can therefore be scaled by the same factor.

Shapes: n losses of a chunk's layers, l layers with experts, e experts.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.layers.left_losses import LayerLosses, LeavesLosses, LeftLoad, LeftLoss
from megatron.model.stage import RankModel
from megatron.parallel.tensor import TensorParallel
from megatron.runtime.batch import DeviceMicrobatch

Place: TypeAlias = tuple[int, str]
"""The index of a layer in the whole model, and the name of one of its losses."""


@dataclass(frozen=True)
class Source:
    """A result of a stage from which its backward begins: the output, or a layer's loss.

    Attributes:
        edge: the result's gradient edge in the graph.
        gradient: of the loss of the iteration with respect to the result.
    """

    edge: GradientEdge
    gradient: Tensor


@dataclass(frozen=True)
class Sums:
    """The losses and loads of this rank's layers in an iteration, for this rank's tokens.

    Attributes:
        losses: by place; weighted as the iteration's loss, without coefficients.
        loads: int64 [e], how often each expert was chosen, by layer.
    """

    losses: Mapping[Place, Tensor] = field(default_factory=dict)
    loads: Mapping[int, Tensor] = field(default_factory=dict)


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
        self._chunks: dict[int, _ChunkSums] = {}
        self._so_far: dict[int, Tensor] = {}

    def begin(self, batch: Sequence[DeviceMicrobatch]) -> None:
        """Start an iteration over ``batch``."""
        self._batch, self._chunks, self._so_far = batch, {}, {}

    def collector(self) -> LayerLosses:
        """Return the place where the layers leave losses in one forward pass."""
        return LayerLosses(self._so_far)

    def join(
        self, i: int, chunk: int, losses: Sequence[LeftLoss], loads: Sequence[LeftLoad]
    ) -> tuple[Source, ...]:
        """Add the losses of a chunk's layers in microbatch ``i`` to the loss of the iteration.

        Returns:
            The losses as further starting points of the backward, besides the stage's output.
        """
        self.add(i, chunk, losses, loads)
        weight = self.weight(i)
        return tuple(
            Source(get_gradient_edge(own.loss), torch.full_like(own.loss, weight))
            for own in losses
            if own.loss.requires_grad
        )

    def weight(self, i: int) -> float:
        """Return the weight of microbatch ``i``'s losses in the loss of the iteration."""
        # Ranks with parts of the samples have means over their parts, whose mean is the loss.
        return self._batch[i].mean_weight / self._parts

    def add(
        self, i: int, chunk: int, losses: Sequence[LeftLoss], loads: Sequence[LeftLoad]
    ) -> None:
        """Add the losses and loads of a chunk's layers in microbatch ``i`` to the sums."""
        if losses or loads:
            wide, own = self._batch[i].weight_n.dtype, losses if self._tells else ()
            sums = self._chunks.setdefault(chunk, _ChunkSums())
            sums.add(own, loads, self.weight(i), wide)

    def lasting(self) -> list[Tensor]:
        """Return the tensors that the first microbatch makes, and that last as the iteration does.

        Later microbatches add to them, or replace them.
        """
        return [*self._so_far.values(), *(t for own in self._chunks.values() for t in own.sums())]

    def sums(self) -> Sums:
        """Return the losses and loads of the iteration."""
        chunks = self._chunks.values()
        return Sums(
            {place: value for own in chunks for place, value in own.losses()},
            {layer: times_e for own in chunks for layer, times_e in own.loads()},
        )


class _ChunkSums:
    """Sums over microbatches of one chunk; every microbatch leaves the same losses and loads."""

    def __init__(self) -> None:
        self._places: list[Place] = []
        self._layers: list[int] = []
        self._losses_n: Tensor | None = None
        self._times_le: Tensor | None = None

    def add(
        self,
        losses: Sequence[LeftLoss],
        loads: Sequence[LeftLoad],
        weight: float,
        wide: torch.dtype,
    ) -> None:
        self._places = [(own.layer, own.name) for own in losses]
        self._layers = [own.layer for own in loads]
        if losses:
            own_n = torch.stack([own.value.to(wide) for own in losses]).mul_(weight)
            self._losses_n = own_n if self._losses_n is None else self._losses_n.add_(own_n)
        if loads:
            own_le = torch.stack([own.times_e for own in loads])
            self._times_le = own_le if self._times_le is None else self._times_le.add_(own_le)

    def sums(self) -> Iterator[Tensor]:
        yield from (own for own in (self._losses_n, self._times_le) if own is not None)

    def losses(self) -> Iterator[tuple[Place, Tensor]]:
        if self._losses_n is not None:
            yield from zip(self._places, self._losses_n.unbind(), strict=True)

    def loads(self) -> Iterator[tuple[int, Tensor]]:
        if self._times_le is not None:
            yield from zip(self._layers, self._times_le.unbind(), strict=True)


def places_of(model: RankModel) -> tuple[list[Place], list[int]]:
    """Return the losses that a rank's layers leave, and the layers that leave a load of experts."""
    places, layers = list[Place](), list[int]()
    for index, layer in model.all_layers():
        for part in layer.modules():
            if isinstance(part, LeavesLosses):
                places += [(index, name) for name in part.losses_left]
                layers += [index] * part.leaves_load
    return places, layers
