"""A tensor axis in a test: all ranks of the pool share the layers."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from megatron.parallel.groups import ConnectedAxis
from megatron.parallel.lanes import InlineLane, ThreadLane
from megatron.parallel.tensor import ALONE, SharedTokens, SplitTokens, TensorParallel


@contextmanager
def shared_by_all(*, split_tokens: bool) -> Iterator[TensorParallel]:
    """The strategy of this rank of the pool, with a lane that ends with the context."""
    size = dist.get_world_size()
    axis = ConnectedAxis("tensor", dist.get_rank(), tuple(range(size)), dist.group.WORLD)
    lane = ThreadLane("tensor")
    try:
        yield (SplitTokens if split_tokens else SharedTokens)(axis, lane)
    finally:
        lane.close()


def without_groups(rank: int, size: int, *, split_tokens: bool) -> TensorParallel:
    """The strategy of a rank that communicates with nobody."""
    axis = ConnectedAxis("tensor", rank, tuple(range(size)))
    if size == 1:
        return ALONE
    return (SplitTokens if split_tokens else SharedTokens)(axis, InlineLane())
