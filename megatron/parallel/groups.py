"""The rank grid and its process groups, passed explicitly to whoever communicates.

On NCCL a group is a communicator, and two streams of traffic on one communicator would wait for
each other: vocabulary collectives and the two directions of point-to-point have a group of their
own each. On gloo a group is a thread that wakes up a hundred times a second, on a core that has
work to do: there both directions share one, and tell their messages apart by tags.
"""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class PipelineGroups:
    """One rank's view of the pipeline.

    Attributes:
        rank: pipeline rank, 0 to size - 1.
        size: pipeline ranks p.
        device: where this rank computes.
        vocabulary: group of the vocabulary collectives C0, C1, C2, CIF, CIB.
        forward: group of activations on their way to the next stage.
        backward: group of gradients on their way to the previous stage; on a CPU the same.
        control: group of everything outside the schedule: losses, gradient norm, messages; that of
            the whole job.
        ends: group of the ranks of the first and the last stage where they hold copies of tied
            weights; ``None`` on the others, and where there are no two copies.
        state: group in which the hosts exchange the optimizer's state, on CPUs whatever the device.
    """

    rank: int
    size: int
    device: torch.device
    vocabulary: dist.ProcessGroup | None = None
    forward: dist.ProcessGroup | None = None
    backward: dist.ProcessGroup | None = None
    control: dist.ProcessGroup | None = None
    ends: dist.ProcessGroup | None = None
    state: dist.ProcessGroup | None = None

    def all_reduce(self, value: torch.Tensor) -> None:
        """Sum ``value`` in place over the pipeline."""
        if self.size > 1:
            dist.all_reduce(value, group=self.control)

    def all_gather_object(self, value: object) -> list[object]:
        """Return every rank's ``value``, in the order of the ranks."""
        gathered: list[object] = [value]
        if self.size > 1:
            gathered = [None] * self.size
            dist.all_gather_object(gathered, value, group=self.control)
        return gathered

    def barrier(self) -> None:
        """Wait until every rank of the pipeline is here."""
        if self.size > 1:
            dist.barrier(group=self.control)


def single_rank(device: torch.device) -> PipelineGroups:
    """Return the view of a pipeline of one rank, which needs no process group."""
    return PipelineGroups(0, 1, device)


def make_groups(
    device: torch.device, timeout: timedelta, ends: tuple[int, int] | None = None
) -> PipelineGroups:
    """Make the groups of this rank; every rank of the job calls it once, after initialisation.

    Args:
        device: where this rank computes.
        timeout: how long a collective may wait; in ``control`` it is what the job was begun with.
        ends: ranks of the first and the last stage, by default the first and the last rank; one
            rank twice if nothing there is held in two copies.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        return single_rank(device)
    ranks = list(range(size))
    vocabulary = dist.new_group(ranks, timeout=timeout, group_desc="vocabulary")
    forward = backward = dist.new_group(ranks, timeout=timeout, group_desc="forward")
    if device.type != "cpu":
        backward = dist.new_group(ranks, timeout=timeout, group_desc="backward")
    state = dist.new_group(ranks, timeout=timeout, backend="gloo", group_desc="state")
    tied, ends = None, (0, size - 1) if ends is None else ends
    if ends[0] != ends[1]:
        tied = dist.new_group(sorted(ends), timeout=timeout, group_desc="ends")
    return PipelineGroups(
        rank,
        size,
        device,
        vocabulary,
        forward,
        backward,
        dist.group.WORLD,
        tied if rank in ends else None,
        state,
    )
