"""The weights of a bucket in 8 bits, which replicas gather, and a replica's own shard of them.

The optimizer rounds the masters of its shard to 16 bits, as in any other bucket; then the shard is
rounded to 8 bits. So weights are those of a run that gathers 16 bits. No tensor has all weights in
16 bits: the parameters keep shape and dtype, but no memory.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Final

import torch
from torch import Tensor, nn

from megatron.layers.gathered_weight import GatheredWeight
from megatron.model.ownership import OwnedParameter
from megatron.optimizer.bucket import BucketLayout, row_length
from megatron.parallel import collectives
from megatron.parallel.groups import ConnectedAxis

_BITS: Final = torch.uint8  # collectives know no type of 8 bits
_ALIGNED: Final = 4
"""Worths of a weight begin at a multiple of so many: cuBLAS reads one only from a multiple of 16
bytes."""


def narrow_values(
    bucket: Sequence[OwnedParameter],
    layout: BucketLayout,
    narrow: Mapping[int, GatheredWeight],
    axis: ConnectedAxis,
) -> "NarrowValues | None":
    """Return the weights of a bucket in 8 bits; ``None``: they are gathered in their dtype.

    Args:
        bucket: all of its parameters are ``narrow``, or none.
        layout: of the bucket.
        narrow: weights that are gathered in 8 bits, by the ``id`` of their parameters.
        axis: the replicas, for parameters without an ``axis``.
    """
    parameters = [owned.parameter for owned in bucket]
    weights = [narrow[id(own)] for own in parameters if id(own) in narrow]
    if not weights:
        return None
    assert len(weights) == len(parameters), "a bucket is gathered in 8 bits, or is not"
    return NarrowValues(parameters, weights, layout, bucket[0].summed_over(axis).rank)


class NarrowValues:
    """The weights of a bucket; their layers get the weights in 8 bits.

    Args:
        parameters: of one dtype, whole and with equal values on all replicas; they lose their
            values: whoever reads one finds NaN.
        weights: what their layers read, in the same order.
        layout: of the bucket.
        shard: index of this rank's shard.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        weights: Sequence[GatheredWeight],
        layout: BucketLayout,
        shard: int,
    ) -> None:
        first = parameters[0]
        self._weights, self._layout, self._shard = tuple(weights), layout, shard
        self._shapes = [tuple(parameter.shape) for parameter in parameters]
        self._own = torch.zeros(layout.sizes[shard], dtype=first.dtype, device=first.device)
        self._bits = torch.zeros(layout.size, dtype=_BITS, device=first.device)
        sizes = [prod(weight.blocks) for weight in self._weights]
        starts = accumulate((-(-size // _ALIGNED) * _ALIGNED for size in sizes), initial=0)
        self._places = [slice(start, start + n) for start, n in zip(starts, sizes, strict=False)]
        self._worths = torch.ones(self._places[-1].stop, device=first.device)
        self._take_over(parameters)
        for index, weight in enumerate(self._weights):
            weight.give(self._bits_of(index), self._blocks_of(self._worths, index))

    def rows(self, index: int, first: int, last: int) -> Tensor:
        """Return rows ``first`` to ``last`` - 1 of a parameter, in 16 bits; they are the shard's.

        Args:
            index: of the parameter.
            first: the first row.
            last: the row after the last one.
        """
        shape, begin = self._shapes[index], self._layout.bounds[self._shard]
        row, start = row_length(shape), self._layout.starts[index] - begin
        return self._own[start + first * row : start + last * row].view(last - first, *shape[1:])

    @torch.no_grad()
    def gather(self, axis: ConnectedAxis) -> None:
        """Round the shard to 8 bits, and gather the shards of all replicas.

        Args:
            axis: the replicas, with a shard for each.
        """
        own = list(self._layout.rows(self._shapes, self._shard))
        largest = torch.zeros_like(self._worths)
        for index, first, last in own:
            largest_gbc = self._blocks_of(largest, index)
            self._weights[index].raise_to_largest(largest_gbc, self.rows(index, first, last), first)
        for index, weight in enumerate(self._weights):
            weight.note(self._blocks_of(largest, index))
        if any(weight.needs_magnitudes for weight in self._weights):
            # Rows of several shards may share a scale: no shard is rounded before all magnitudes
            # are known.
            collectives.all_reduce(largest, collectives.MAXIMUM, axis)
        scales = self._set_worths(largest)
        for index, first, last in own:
            rows_rk, bits_rk = self.rows(index, first, last), self._bits_of(index)[first:last]
            self._weights[index].round_rows(bits_rk, rows_rk, first, scales[index])
        collectives.gather_parts(self._bits, axis, self._layout.sizes)

    def read_for(self, index: int) -> Mapping[str, Tensor]:
        """Return the bits of a parameter, of its shape, and the worths of its blocks [g, b, c]."""
        return {
            "8 bits": self._bits_of(index).view(_BITS),
            "worths of 8 bits": self._blocks_of(self._worths, index),
        }

    @torch.no_grad()
    def _take_over(self, parameters: Sequence[nn.Parameter]) -> None:
        """Round all parameters, keep the shard in 16 bits, and free the rest."""
        largest = torch.zeros_like(self._worths)
        for index, parameter in enumerate(parameters):
            self._weights[index].raise_to_largest(self._blocks_of(largest, index), parameter, 0)
        for index, weight in enumerate(self._weights):
            weight.note(self._blocks_of(largest, index))
        scales = self._set_worths(largest)
        for index, parameter in enumerate(parameters):
            self._weights[index].round_rows(self._bits_of(index), parameter, 0, scales[index])
        for index, first, last in self._layout.rows(self._shapes, self._shard):
            self.rows(index, first, last).copy_(parameters[index][first:last])
        for parameter in parameters:
            nothing = torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device)
            parameter.data = nothing.expand(parameter.shape)

    def _set_worths(self, largest: Tensor) -> list[Tensor]:
        """Set the worths of all blocks by their largest magnitudes, and return the scales."""
        scales = []
        for index, weight in enumerate(self._weights):
            scale_gbc, worth_gbc = weight.scales(self._blocks_of(largest, index))
            self._blocks_of(self._worths, index).copy_(worth_gbc)
            scales.append(scale_gbc)
        return scales

    def _blocks_of(self, blocks: Tensor, index: int) -> Tensor:
        """Return a parameter's part of a tensor with a number for every block, [g, b, c]."""
        return blocks[self._places[index]].view(self._weights[index].blocks)

    def _bits_of(self, index: int) -> Tensor:
        """Return the bits of a parameter, of its shape."""
        start, shape = self._layout.starts[index], self._shapes[index]
        bits = self._bits[start : start + prod(shape)]
        return bits.view(self._weights[index].dtype).view(shape)
