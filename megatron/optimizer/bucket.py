"""Buckets: parameters whose gradients are reduced together, side by side in one tensor.

A bucket has one shard for each replica. Replica k adds up shard k of the gradients, and with a
sharded optimizer (ZeRO, arXiv 1910.02054) it alone updates the parameters of shard k. No boundary
cuts a row of a parameter, so a shard is a list of rows, and the optimizer's state can be saved and
loaded like any other tensor. Shards have equal sizes, which costs padding at the end of the bucket:
less than a row for each shard. (``bucket_layouts`` has shards of whole matrices.)

Boundaries also fall on multiples of ``VECTOR``, the number of elements that a kernel takes at once.
On CPUs a kernel rounds the remaining elements at the end of a tensor differently, so with other
boundaries the result would depend on the shards.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import lcm, prod
from typing import Final, Protocol

import torch
from torch import Tensor

from megatron.kernels.face import Kernels
from megatron.layers.main_grad import (
    forget_main_grad,
    give_main_grad,
    main_grad_of,
    take_main_grad,
)
from megatron.model.ownership import OwnedParameter
from megatron.optimizer.parameters import ParameterPart
from megatron.parallel import collectives
from megatron.parallel.groups import ConnectedAxis

Shape = tuple[int, ...]

VECTOR: Final = 16
"""Elements in fp32 of the widest register of a CPU."""


@dataclass(frozen=True)
class BucketLayout:
    """The places of parameters in a bucket, and the boundaries of its shards.

    Attributes:
        starts: the first element of every parameter.
        bounds: the first element of every shard, and the end of the last one.
    """

    starts: tuple[int, ...]
    bounds: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements of the bucket, padding included."""
        return self.bounds[-1]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of every shard."""
        return tuple(end - begin for begin, end in pairwise(self.bounds))

    def shard(self, index: int) -> slice:
        """Return the elements of a shard."""
        return slice(self.bounds[index], self.bounds[index + 1])

    def rows(self, shapes: Sequence[Shape], shard: int) -> Iterator[tuple[int, int, int]]:
        """Yield the parameters that have rows in a shard: index, first row, row after the last.

        Args:
            shapes: of all parameters.
            shard: index of the shard.
        """
        own = self.shard(shard)
        for index, (shape, start) in enumerate(zip(shapes, self.starts, strict=True)):
            row = row_length(shape)
            begin, end = max(own.start, start), min(own.stop, start + prod(shape))
            if begin < end:
                yield index, (begin - start) // row, (end - start) // row


def row_length(shape: Shape) -> int:
    """Return the number of elements in a row: 1 for a vector."""
    return prod(shape[1:])


def lay_out(shapes: Sequence[Shape], shards: int) -> BucketLayout:
    """Lay out parameters side by side in equal shards, whose bounds cut no row and no vector.

    Parameters with the longest rows come first. Every row length divides the longer ones
    (``share_a_bucket``), so each parameter starts at a multiple of its row length, and no shard
    boundary cuts a row. Starts and boundaries are also multiples of ``VECTOR``. In usual models
    this costs no padding, because all sizes are such multiples.

    Args:
        shapes: of the parameters.
        shards: number of shards.
    """
    rows = [row_length(shape) for shape in shapes]
    assert shards == 1 or share_a_bucket(rows), (
        f"rows of {sorted(set(rows))} elements do not fit together"
    )
    starts, end = [0] * len(shapes), 0
    for index in sorted(range(len(shapes)), key=lambda i: -rows[i]):
        step = lcm(rows[index], VECTOR) if shards > 1 else 1
        starts[index] = -(-end // step) * step
        end = starts[index] + prod(shapes[index])
    unit = lcm(max(rows), VECTOR) if shards > 1 else 1
    shard_size = -(-end // (shards * unit)) * unit
    return BucketLayout(tuple(starts), tuple(shard_size * k for k in range(shards + 1)))


def share_a_bucket(rows: Sequence[int]) -> bool:
    """Return whether each length of a row divides the next longer one."""
    lengths = sorted(set(rows))
    return all(longer % shorter == 0 for shorter, longer in pairwise(lengths))


class Values(Protocol):
    """The parameters of a bucket in another form than one tensor of their dtype."""

    def rows(self, index: int, first: int, last: int) -> Tensor:
        """Return rows ``first`` to ``last`` - 1 of parameter ``index``, which this rank updates."""
        ...

    def gather(self, axis: ConnectedAxis) -> None:
        """Let all ranks of the axis have the updated rows of all."""
        ...

    def read_for(self, index: int) -> Mapping[str, Tensor]:
        """Return the tensors that passes read in place of parameter ``index``, by kind."""
        ...


class Bucket:
    """The gradients of some parameters of a rank, and with a sharded optimizer the parameters too.

    Each parameter gets a ``main_grad``: a zeroed view of the bucket's gradients. Passes that form
    weight gradients themselves (T, IB, W) add to ``main_grad`` directly. For autograd's gradients a
    hook adds ``.grad`` to ``main_grad`` and frees ``.grad``, so that at most one layer's gradient
    is alive. In fp32, after a first gradient, ``main_grad`` *is* ``.grad``, and autograd adds to
    it.

    Args:
        parameters: all of one dtype, with gradients that are summed over the same ranks. Gradients
            of bf16 and fp16 parameters have ``gradient_dtype``, others the parameters' dtype.
        kernels: of the parameters' device and dtype.
        layout: of the parameters; ``None``: side by side, in one shard.
        together: whether the parameters, too, are moved into one tensor, so that replicas can
            gather them.
        given: the parameters, in another form than ``together`` makes; they have no values of their
            own.
        gradient_dtype: of the sums of gradients, for 16-bit parameters.

    Attributes:
        owned: the parameters, as the model owns them.
        layout: where the parameters lie.
        values: the tensor of all parameters, in the same layout; ``None`` unless ``together``,
            and if they are ``given``.
    """

    def __init__(
        self,
        parameters: Sequence[OwnedParameter],
        kernels: Kernels,
        layout: BucketLayout | None = None,
        *,
        together: bool = False,
        given: Values | None = None,
        gradient_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.owned = tuple(parameters)
        self._kernels = kernels
        first = self.owned[0].parameter
        shapes = [tuple(own.parameter.shape) for own in parameters]
        self.layout = lay_out(shapes, shards=1) if layout is None else layout
        full = first.dtype in (torch.float32, torch.float64)
        dtype = first.dtype if full else gradient_dtype
        self._gradients = torch.zeros(self.layout.size, dtype=dtype, device=first.device)
        self.values = self._moved_together() if together and given is None else None
        self._given = given
        for parameter, main_grad in self._views(self._gradients):
            give_main_grad(parameter, main_grad)
            parameter.register_post_accumulate_grad_hook(self._move_to_main_grad)
        self._is_full = full

    def summed_over(self, usual: ConnectedAxis) -> ConnectedAxis:
        """Return the ranks that each have a shard; see ``OwnedParameter.summed_over``."""
        return self.owned[0].summed_over(usual)

    @property
    def gradients(self) -> Tensor:
        """The sums of all parameters' gradients, one-dimensional and complete, to read or to set.

        The memory is always the same. After ``forget_gradients`` this property must be read again,
        because reading it completes the sums.
        """
        self.complete_gradients()
        return self._gradients

    def complete_gradients(self) -> None:
        """Set to 0 the gradient sums of parameters that got no gradient in this iteration."""
        for own in self.owned:
            main_grad_of(own.parameter)

    def forget_gradients(self) -> None:
        """Begin new sums, which the first gradients overwrite; see ``layers.main_grad``."""
        for own in self.owned:
            forget_main_grad(own.parameter)
            own.parameter.grad = None

    def parts(self, shard: int) -> Iterator[ParameterPart]:
        """Yield the parts of parameters that lie in a shard."""
        shapes = [tuple(own.parameter.shape) for own in self.owned]
        for index, first, end in self.layout.rows(shapes, shard):
            weight = None if self._given is None else self._given.rows(index, first, end)
            yield ParameterPart.rows(self.owned[index], first, end, weight)

    @property
    def is_given(self) -> bool:
        """Whether the parameters were ``given``."""
        return self._given is not None

    def gather(self, axis: ConnectedAxis) -> None:
        """Let all ranks of the axis, which each have a shard, have the updated parameters of all.

        The parameters lie together, or were given.
        """
        if self._given is not None:
            self._given.gather(axis)
            return
        assert self.values is not None, "the parameters lie together"
        collectives.gather_parts(self.values, axis, self.layout.sizes)

    def read_by_passes(self) -> Iterator[tuple[OwnedParameter, Mapping[str, Tensor]]]:
        """Yield every parameter with the tensors that passes read for it, by kind."""
        for index, own in enumerate(self.owned):
            if self._given is not None:
                yield own, self._given.read_for(index)
            else:
                yield own, {"value": own.parameter}

    def _views(self, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield every parameter, with its view of ``flat``, a tensor in the bucket's layout."""
        for own, start in zip(self.owned, self.layout.starts, strict=True):
            parameter = own.parameter
            yield parameter, flat[start : start + parameter.numel()].view(parameter.shape)

    @torch.no_grad()
    def _moved_together(self) -> Tensor:
        first = self.owned[0].parameter
        values = torch.zeros(self.layout.size, dtype=first.dtype, device=first.device)
        for parameter, place in self._views(values):
            place.copy_(parameter)
            parameter.data = place
        return values

    def _move_to_main_grad(self, parameter: Tensor) -> None:
        """Add the gradient that autograd has just left in ``.grad`` and free it."""
        grad = parameter.grad
        if grad is None:  # W forms this weight's gradient, so autograd has none
            return
        main_grad, begins = take_main_grad(parameter)
        if begins:
            main_grad.copy_(grad)
        # In fp32 ``.grad`` is the sum, and autograd has added to it already.
        elif grad is not main_grad:
            self._kernels.accumulate_(main_grad, grad)
        parameter.grad = main_grad if self._is_full else None
