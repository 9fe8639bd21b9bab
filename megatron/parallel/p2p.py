"""Point-to-point transfers between stages, asynchronous on both sides."""

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from megatron.parallel.groups import ConnectedAxis


@dataclass(frozen=True)
class Transfer:
    """A running transfer; it keeps the tensor alive until ``wait``."""

    tensor: Tensor
    work: dist.Work

    def wait(self) -> Tensor:
        """Return the tensor; on CUDA the current stream waits for the transfer, not the host."""
        self.work.wait()
        return self.tensor


def send(tensor: Tensor, destination: int, axis: ConnectedAxis, tag: int = 0) -> Transfer:
    """Start sending a contiguous ``tensor`` to another rank of ``axis``.

    Args:
        tensor: the tensor to send.
        destination: the other rank's place on the axis.
        axis: the axis of both ranks.
        tag: messages with the same tag arrive in order; NCCL ignores tags and keeps all in order.
    """
    assert axis.group is not None, "a single rank has nobody to send to"
    # The group's own method, because the checks of ``dist.isend`` take as long as the transfer.
    return Transfer(tensor, axis.group.send([tensor], destination, tag))


def receive(buffer: Tensor, source: int, axis: ConnectedAxis, tag: int = 0) -> Transfer:
    """Start receiving into ``buffer`` from another rank of ``axis``; arguments as in ``send``."""
    assert axis.group is not None, "a single rank has nobody to receive from"
    return Transfer(buffer, axis.group.recv([buffer], source, tag))
