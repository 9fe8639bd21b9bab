"""Buckets of an emulated rank: real reductions and gatherings of a few numbers over the replicas.

Every pass adds what it has come to to the buckets that it touches, and takes the numbers of those
that it reads. So a checksum is wrong if a bucket is reduced before its last pass, or read before it
is gathered.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron.parallel import collectives
from megatron.parallel.groups import ConnectedAxis
from megatron.parallel.lanes import Lane, Pending
from megatron.runtime.observer import Observer
from megatron.runtime.replica_work import ReplicaWork
from megatron.schedules.buckets import Bucket, Touch
from megatron.schedules.needs import Comm
from megatron.schedules.passes import Pass

DTYPE = torch.float64
"""Exact for sums of numbers below 2^31 over any number of passes and replicas."""


class EmulatedBuckets:
    """The numbers in a rank's buckets, one for each replica.

    Args:
        buckets: of the rank; none if nothing is done with replicas.
        axis: the replicas.

    Attributes:
        gradients: of every bucket.
        parameters: of every bucket.
        axis: the replicas.
        sizes: of a bucket's shards.
    """

    def __init__(self, buckets: Sequence[Bucket], axis: ConnectedAxis) -> None:
        self.axis = axis
        self.sizes = (1,) * axis.size
        self.gradients = [torch.zeros(axis.size, dtype=DTYPE) for _ in buckets]
        self.parameters = [torch.zeros(axis.size, dtype=DTYPE) for _ in buckets]
        self._touched: dict[Touch, list[Tensor]] = defaultdict(list)
        self._read: dict[Touch, list[Tensor]] = defaultdict(list)
        for bucket, gradients, parameters in zip(
            buckets, self.gradients, self.parameters, strict=True
        ):
            for touch in bucket.after:
                self._touched[touch].append(gradients)
            for touch in bucket.before:
                self._read[touch].append(parameters)

    def clear(self) -> None:
        """Begin an iteration anew: no gradient is there, and no parameter up to date."""
        for tensor in (*self.gradients, *self.parameters):
            tensor.zero_()

    def read(self, item: Pass) -> list[Tensor]:
        """Return the numbers that ``item`` takes from the buckets that it reads."""
        return [parameters.sum() for parameters in self._read[item.kind, item.chunk]]

    def add(self, item: Pass, value: int) -> None:
        """Add the number of ``item`` to the buckets that it touches."""
        for gradients in self._touched[item.kind, item.chunk]:
            gradients += value


@dataclass(frozen=True)
class _Held:
    """Gradients of a bucket."""

    gradients: Tensor


class EmulatedReplicaWork(ReplicaWork):
    """The reductions, updates and gatherings of an emulated rank.

    Args:
        buckets: of the rank.
        lane: where communication runs beside the passes.
        sharded: whether each replica gets the sums of its own part only.
        updated: returns the number that a replica's update of a bucket leaves.
    """

    def __init__(
        self,
        buckets: EmulatedBuckets,
        lane: Lane,
        *,
        sharded: bool,
        updated: Callable[[int], int],
    ) -> None:
        sizes = [buckets.sizes] * len(buckets.gradients)
        axes = [buckets.axis] * len(sizes)
        super().__init__(list(map(_Held, buckets.gradients)), sizes, axes, lane)
        self._emulated = buckets
        self._replicas = lane
        self._sharded = sharded
        self._updated = updated

    def update(self, bucket: int) -> None:
        """U: leave a number in this replica's part of a bucket."""
        self._emulated.parameters[bucket][self._emulated.axis.rank] = self._updated(bucket)

    def start(self, comm: Comm, recorder: Observer | None = None) -> Pending[object]:
        """Begin RG or AG of a bucket."""
        own, bucket = self._emulated, comm.microbatch
        if comm.kind == "AG":
            work = partial(collectives.gather_parts, own.parameters[bucket], own.axis, own.sizes)
        elif self._sharded:
            work = partial(collectives.reduce_scatter, own.gradients[bucket], own.axis, own.sizes)
        else:
            return super().start(comm, recorder)
        return self._replicas.submit(work if recorder is None else recorder.timed(comm, work))

    def total(self) -> int:
        """Return the sum of this rank's own parts of all reduced buckets."""
        rank = self._emulated.axis.rank
        return sum(int(gradients[rank].item()) for gradients in self._emulated.gradients)
