"""Sums the gradients of a rank over its replicas, bucket by bucket, beside the passes."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from megatron.parallel import collectives
from megatron.parallel.groups import ConnectedAxis
from megatron.parallel.lanes import Lane, Pending
from megatron.runtime.observer import Observer
from megatron.schedules.needs import Comm


class GradientReducer:
    """The reductions of one rank.

    Args:
        buckets: the gradients of every bucket, one-dimensional; the sums replace them.
        axis: the replicas, with a process group that nothing else uses meanwhile.
        lane: where reductions run beside the passes.
        dtype: in which gradients travel and add up; ``None``: their own.
    """

    def __init__(
        self,
        buckets: Sequence[Tensor],
        axis: ConnectedAxis,
        lane: Lane,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._buckets = buckets
        self._axis = axis
        self._lane = lane
        self._dtype = dtype

    def start(self, comm: Comm, recorder: Observer | None = None) -> Pending[object]:
        """Begin to reduce a bucket; its gradients are complete."""
        work = partial(self._reduce, self._buckets[comm.microbatch])
        return self._lane.submit(work if recorder is None else recorder.timed(comm, work))

    def _reduce(self, bucket: Tensor) -> None:
        if self._dtype is None or self._dtype == bucket.dtype:
            collectives.all_reduce(bucket, collectives.SUM, self._axis)
            return
        narrow = bucket.to(self._dtype)
        bucket.copy_(collectives.all_reduce(narrow, collectives.SUM, self._axis))
