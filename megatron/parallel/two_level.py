"""Collectives over all ranks of a replica in two levels, for the vocabulary.

A replica is a grid: a row holds the t tensor-parallel ranks of one pipeline rank, a column the p
pipeline ranks with one place tp on the tensor axis. Rows are close together, columns far apart. So
an activation is cut before it travels far: each column moves one of t parts, and rows put the parts
together or add them up. With t = 1 every method is one collective over the column.

Shapes: a tensor is *whole* if it has all tokens of a microbatch, and consists of t *parts* of equal
size, one after the other; part tp belongs to place tp of a row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from megatron.parallel import collectives
from megatron.parallel.groups import ConnectedAxis

T = TypeVar("T")


@dataclass(frozen=True)
class TwoLevels:
    """The rows and columns of a replica, as one rank sees them.

    Attributes:
        row: the tensor-parallel ranks of this pipeline rank.
        column: the ranks of the pipeline that have the place in their rows that this rank has in
            its row.
        wants_parts: whether the ranks that receive a sum need only their parts of it, as with
            sequence parallelism; otherwise each needs the whole sum.
    """

    row: ConnectedAxis
    column: ConnectedAxis
    wants_parts: bool = False

    def broadcast(self, whole: Tensor, root: int) -> Tensor:
        """Fill ``whole`` on every rank with the values of the root's row.

        Args:
            whole: contiguous; every rank of the root's row has the values already.
            root: pipeline rank.
        """
        parts = whole.view(self.row.size, -1)
        collectives.broadcast(parts[self.row.rank], root, self.column)
        if self.column.rank != root:
            collectives.gather_parts(whole.view(-1), self.row)
        return whole

    def reduce(self, whole: Tensor, root: int) -> Tensor:
        """Sum ``whole`` over all ranks, for the ranks of the root's row.

        Args:
            whole: contiguous; changed.
            root: pipeline rank.

        Returns:
            On the root's row the sum, of the shape of ``whole``, or its part, one-dimensional. On
            other ranks the values mean nothing.
        """
        flat = whole.view(-1)
        collectives.reduce_scatter(flat, self.row)
        # A view: the column's sum appears inside ``flat``, where the row gathers it.
        part: Tensor = flat.view(self.row.size, -1)[self.row.rank]
        collectives.reduce(part, root, self.column)
        if self.column.rank != root or self.row.size == 1:
            return whole
        if self.wants_parts:
            return part.clone()  # not a view, which would keep the whole alive
        collectives.gather_parts(flat, self.row)
        return whole

    def combine(self, tensor: Tensor, operation: collectives.Operation) -> Tensor:
        """Combine ``tensor`` over all ranks by ``operation``, in place, for every rank."""
        collectives.all_reduce(tensor, operation, self.row)
        return collectives.all_reduce(tensor, operation, self.column)

    def merge(
        self,
        tensor: Tensor,
        again: Callable[[Tensor], Tensor],
        last: Callable[[Tensor], T],
    ) -> T:
        """Gather the tensors of all ranks and merge them: first in the rows, then in the columns.

        Args:
            tensor: this rank's tensor.
            again: merges [t, ...] of a row into a tensor of the shape of ``tensor``.
            last: merges [p, ...] of a column.

        Returns:
            The result of ``last``, on every rank.
        """
        if self.row.size > 1:
            tensor = again(collectives.all_gather(tensor, self.row))
        return last(collectives.all_gather(tensor, self.column))
