"""Point-to-point transfers between stages, asynchronous on both sides."""

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Transfer:
    """A transfer under way; keeps the tensor alive until it is waited for."""

    tensor: Tensor
    work: dist.Work

    def wait(self) -> Tensor:
        """Return the tensor; on CUDA the current stream waits for the transfer, not the host."""
        self.work.wait()
        return self.tensor


def send(tensor: Tensor, destination: int, group: dist.ProcessGroup | None) -> Transfer:
    """Start sending a contiguous ``tensor`` to a rank of ``group``."""
    assert group is not None, "a single rank has nobody to send to"
    # The group's own methods: what ``dist.isend`` checks first takes as long as the transfer.
    return Transfer(tensor, group.send([tensor], destination, 0))


def receive(buffer: Tensor, source: int, group: dist.ProcessGroup | None) -> Transfer:
    """Start receiving into ``buffer`` from a rank of ``group``."""
    assert group is not None, "a single rank has nobody to receive from"
    return Transfer(buffer, group.recv([buffer], source, 0))
