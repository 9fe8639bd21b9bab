"""The work that a rank shares with its replicas, bucket by bucket, while passes run.

RG reduces gradients, U updates parameters, and AG gathers parameters. If ranks of one replica have
summands of the same gradients, RG first sums within the replica, then over the replicas.
"""

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from megatron.optimizer.sharded import ShardedOptimizer
from megatron.parallel import collectives
from megatron.parallel.groups import ConnectedAxis
from megatron.parallel.lanes import Lane, Pending
from megatron.runtime.observer import Observer
from megatron.schedules.needs import Comm


class HasGradients(Protocol):
    """Gradients that are reduced together."""

    @property
    def gradients(self) -> Tensor:
        """All sums, one-dimensional; read only when the sums are complete."""
        ...


class ReplicaWork:
    """The reductions of one rank, and with a sharded optimizer its updates and gatherings.

    Args:
        buckets: the buckets to reduce; the sums replace their gradients.
        sizes: for every bucket, the sizes of its shards, one for each replica.
        axes: for every bucket, the replicas, with a process group that only this work uses.
        lane: where communication runs while passes run.
        dtype: of gradients while they are sent and summed; ``None``: the gradients' own dtype.
        optimizer: the optimizer, if it is sharded. A replica then gets the sums of its shards only.
        within: for every bucket, the axes within the replica over which gradients are summed first,
            with process groups that only this work uses; all empty by default.
    """

    def __init__(
        self,
        buckets: Sequence[HasGradients],
        sizes: Sequence[Sequence[int]],
        axes: Sequence[ConnectedAxis],
        lane: Lane,
        dtype: torch.dtype | None = None,
        optimizer: ShardedOptimizer | None = None,
        within: Sequence[Sequence[ConnectedAxis]] | None = None,
    ) -> None:
        self._buckets = buckets
        self._sizes = sizes
        self._axes = axes
        self._lane = lane
        self._dtype = dtype
        self._optimizer = optimizer
        self._within = [()] * len(buckets) if within is None else within

    def update(self, bucket: int) -> None:
        """U: update this rank's shard of a bucket, if a deferred step is waiting."""
        assert self._optimizer is not None, "only a sharded optimizer updates bucket by bucket"
        self._optimizer.update(bucket)

    def start(self, comm: Comm, recorder: Observer | None = None) -> Pending[object]:
        """Begin RG of a bucket with complete gradients, or AG of a bucket that is updated."""
        if comm.kind == "RG":
            gradients = self._buckets[comm.microbatch].gradients  # before the lane begins
            work = partial(self._reduce, comm.microbatch, gradients)
        else:
            assert self._optimizer is not None, "only a sharded optimizer gathers parameters"
            work = partial(self._optimizer.gather, comm.microbatch)
        return self._lane.submit(work if recorder is None else recorder.timed(comm, work))

    def gather_again(self, bucket: int) -> Pending[object]:
        """Begin AG of a bucket in the lane, whether the bucket has been updated or not."""
        assert self._optimizer is not None, "only a sharded optimizer gathers parameters"
        return self._lane.submit(partial(self._optimizer.gather_again, bucket))

    def _reduce(self, bucket: int, gradients: Tensor) -> None:
        # Before the replicas: their reduce-scatter leaves valid sums in this rank's shard only.
        for axis in self._within[bucket]:
            collectives.all_reduce(gradients, collectives.SUM, axis)
        if self._dtype is None or self._dtype == gradients.dtype:
            self._sum(bucket, gradients)
            return
        narrow = gradients.to(self._dtype)
        self._sum(bucket, narrow)
        gradients.copy_(narrow)

    def _sum(self, bucket: int, gradients: Tensor) -> None:
        axis, sizes = self._axes[bucket], self._sizes[bucket]
        if self._optimizer is None:
            collectives.all_reduce_parts(gradients, axis, sizes)
        else:
            collectives.reduce_scatter(gradients, axis, sizes)
