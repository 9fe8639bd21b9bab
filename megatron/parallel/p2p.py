"""Point-to-point transfers between stages, asynchronous on both sides."""

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from megatron.parallel.groups import ConnectedAxis


@dataclass(frozen=True)
class Transfer:
    """A transfer under way; keeps the tensor alive until it is waited for."""

    tensor: Tensor
    work: dist.Work

    def wait(self) -> Tensor:
        """Return the tensor; on CUDA the current stream waits for the transfer, not the host."""
        self.work.wait()
        return self.tensor


def send(tensor: Tensor, destination: int, axis: ConnectedAxis, tag: int = 0) -> Transfer:
    """Start sending a contiguous ``tensor`` to another rank of ``axis``.

    Args:
        tensor: what to send.
        destination: its place on the axis.
        axis: both ranks are on it.
        tag: what has one tag arrives in order; on NCCL all has, whatever its tag.
    """
    assert axis.group is not None, "a single rank has nobody to send to"
    # The group's own methods: what ``dist.isend`` checks first takes as long as the transfer.
    return Transfer(tensor, axis.group.send([tensor], destination, tag))


def receive(buffer: Tensor, source: int, axis: ConnectedAxis, tag: int = 0) -> Transfer:
    """Start receiving into ``buffer`` from another rank of ``axis``, as ``send`` sends."""
    assert axis.group is not None, "a single rank has nobody to receive from"
    return Transfer(buffer, axis.group.recv([buffer], source, tag))
