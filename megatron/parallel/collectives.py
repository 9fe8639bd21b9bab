"""Collectives of the vocabulary layers: to one rank where only one needs the result."""

import torch
import torch.distributed as dist
from torch import Tensor


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


def all_gather(tensor: Tensor, group: dist.ProcessGroup | None, size: int) -> Tensor:
    """Return [size, ...] with the ``tensor`` of every rank."""
    gathered = torch.empty((size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
    if size > 1:
        dist.all_gather(list(gathered.unbind(0)), tensor, group=group)
    else:
        gathered[0].copy_(tensor)
    return gathered
