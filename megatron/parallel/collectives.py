"""Collectives over an axis; a result that only one rank needs goes to the place ``root``."""

from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.parallel import p2p
from megatron.parallel.groups import ConnectedAxis

Operation = dist.ReduceOp.RedOpType
MAXIMUM: Final = dist.ReduceOp.MAX
SUM: Final = dist.ReduceOp.SUM

_gather_whole = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""PyTorch 2.13 renamed this function, and warns about the name of older versions."""


def broadcast(tensor: Tensor, root: int, axis: ConnectedAxis) -> Tensor:
    """Fill ``tensor`` on every rank with the values of the root's."""
    if axis.size > 1:
        dist.broadcast(tensor, group=axis.group, group_src=root)
    return tensor


def reduce(tensor: Tensor, root: int, axis: ConnectedAxis) -> Tensor:
    """Sum ``tensor`` over the ranks into the root's; on other ranks it is undefined afterwards."""
    if axis.size == 1:
        return tensor
    if tensor.device.type == "cpu":
        return _reduce_along_tree(tensor, root, axis)
    dist.reduce(tensor, group=axis.group, group_dst=root)
    return tensor


def _reduce_along_tree(tensor: Tensor, root: int, axis: ConnectedAxis) -> Tensor:
    """Sum up along a binomial tree, because gloo's own reduction takes many steps.

    Measured with 2 ranks on 2 cores and an activation of half a MiB: 0.3 ms instead of 1.9 ms.
    """
    size = axis.size
    place, step = (axis.rank - root) % size, 1  # counted from the root
    while step < size and not place & step:
        if place + step < size:
            buffer = torch.empty_like(tensor)
            tensor.add_(p2p.receive(buffer, (place + step + root) % size, axis).wait())
        step *= 2
    if place:
        p2p.send(tensor, (place - step + root) % size, axis).wait()
    return tensor


def all_reduce(tensor: Tensor, operation: Operation, axis: ConnectedAxis) -> Tensor:
    """Combine ``tensor`` over the ranks by ``operation``, in place, the same on every rank."""
    if axis.size > 1:
        dist.all_reduce(tensor, operation, group=axis.group)
    return tensor


def all_gather(tensor: Tensor, axis: ConnectedAxis) -> Tensor:
    """Return [size, ...] with the ``tensor`` of every rank, by place."""
    gathered = torch.empty((axis.size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
    if axis.size == 1:
        gathered[0].copy_(tensor)
    elif tensor.device.type == "cpu":
        _gather_by_doubling(gathered, tensor, axis)
    else:
        _gather_whole(gathered, tensor, group=axis.group)
    return gathered


def _gather_by_doubling(gathered: Tensor, own: Tensor, axis: ConnectedAxis) -> None:
    """Fill ``gathered`` in a logarithmic number of steps (Bruck et al., IEEE TPDS 8, 1997).

    Gloo's own all-gather passes everything around a ring, from neighbour to neighbour. Statistics
    are so small that the number of steps decides the time. In step k every rank sends all blocks
    that it holds to the rank 2^k below.
    """
    rank, size = axis.rank, axis.size
    blocks = torch.empty_like(gathered)  # in order of place, from this rank on
    blocks[0].copy_(own)
    held, sending = 1, []
    while held < size:
        count = min(held, size - held)
        sending.append(p2p.send(blocks[:count], (rank - held) % size, axis))
        p2p.receive(blocks[held : held + count], (rank + held) % size, axis).wait()
        held += count
    for transfer in sending:
        transfer.wait()
    torch.cat((blocks[size - rank :], blocks[: size - rank]), out=gathered)
