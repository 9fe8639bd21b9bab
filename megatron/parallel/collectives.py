"""Collectives of the vocabulary layers: to one rank where only one needs the result."""

from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

Operation = dist.ReduceOp.RedOpType
MAXIMUM: Final = dist.ReduceOp.MAX
SUM: Final = dist.ReduceOp.SUM


def broadcast(tensor: Tensor, root: int, group: dist.ProcessGroup | None, size: int) -> Tensor:
    """Fill ``tensor`` on every rank with the one of ``root``."""
    if size > 1:
        dist.broadcast(tensor, group=group, group_src=root)
    return tensor


def reduce(tensor: Tensor, root: int, group: dist.ProcessGroup | None, size: int) -> Tensor:
    """Sum ``tensor`` over the ranks into the one of ``root``; elsewhere it is undefined after."""
    if size > 1:
        dist.reduce(tensor, group=group, group_dst=root)
    return tensor


def all_reduce(
    tensor: Tensor, operation: Operation, group: dist.ProcessGroup | None, size: int
) -> Tensor:
    """Combine ``tensor`` over the ranks by ``operation``, in place, the same on every rank."""
    if size > 1:
        dist.all_reduce(tensor, operation, group=group)
    return tensor


def all_gather(tensor: Tensor, group: dist.ProcessGroup | None, size: int) -> Tensor:
    """Return [size, ...] with the ``tensor`` of every rank."""
    gathered = torch.empty((size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
    if size > 1:
        dist.all_gather(list(gathered.unbind(0)), tensor, group=group)
    else:
        gathered[0].copy_(tensor)
    return gathered
