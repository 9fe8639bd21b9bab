"""The axes of the grid with their process groups, passed explicitly to all code that communicates.

On NCCL a group is a communicator, and two streams of traffic on one communicator would wait for
each other. Vocabulary collectives, those of tensor parallelism, reductions of gradients and the two
directions of point-to-point transfers therefore have groups of their own. On gloo a group is a
thread that wakes up a hundred times a second and takes time from a busy core. There both directions
share a group, and tags tell their messages apart. For the same reason, axes with the same ranks
share a group if they are used alike.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, TypeVar

import torch
import torch.distributed as dist

from megatron.parallel.grid import Axis, Grid, Tiling

T = TypeVar("T")

CONTROL: Final = "control"
"""Use of a group: everything outside the schedule."""

STATE: Final = "state"
"""Use of a group: messages between hosts, on CPUs whatever the device."""


@dataclass(frozen=True)
class ConnectedAxis(Axis):
    """An axis whose ranks can talk to each other.

    Attributes:
        group: process group of the ranks; ``None`` for a single rank.
    """

    group: dist.ProcessGroup | None = None

    def all_reduce(self, value: torch.Tensor) -> None:
        """Sum ``value`` in place over the axis."""
        if self.size > 1:
            dist.all_reduce(value, group=self.group)

    def all_gather_object(self, value: T) -> list[T]:
        """Return every rank's ``value``, by place."""
        if self.size == 1:
            return [value]
        gathered = [value] * self.size
        dist.all_gather_object(gathered, value, group=self.group)
        return gathered

    def barrier(self) -> None:
        """Wait until every rank of the axis is here."""
        if self.size > 1:
            dist.barrier(group=self.group)


@dataclass(frozen=True)
class Groups:
    """One rank's view of the job.

    Attributes:
        device: device on which this rank computes.
        grid: coordinates of all ranks.
        world: the whole job, for everything outside the schedule: messages, timings, agreement.
        tensor: the ranks that share a layer, for collectives that passes wait for.
        tensor_sums: the same ranks, for sums outside the schedule.
        data: the ranks that hold the same part of each replica; ``data.rank`` is the replica.
        gradients: the same ranks, for the reductions of gradients beside the passes.
        partial_gradients: the ranks of ``tensor``, for the sums of gradients of which each has a
            part, beside the passes.
        pipeline: the ranks that share a replica stage by stage, for sums outside the schedule:
            losses and the gradient norm.
        forward: the pipeline, for activations on their way to the next stage.
        backward: the pipeline, for gradients on their way to the previous stage; on a CPU with the
            group of ``forward``.
        vocabulary: all ranks of a replica, by the shard of the vocabulary that they have. They
            talk in rows and columns (``two_level``).
        row: the ranks of ``tensor``, for the vocabulary's collectives within a stage's ranks.
        column: the pipeline, for the vocabulary's collectives between its ranks.
        ends: the ranks of the first and the last stage if they hold copies of tied weights, for
            the sums of their gradients; this rank alone if it holds no copy.
        world_hosts: the whole job, for messages between hosts: on CPUs whatever the device.
        pipeline_hosts: the pipeline, for hosts to exchange the sums of the optimizer's step.
    """

    device: torch.device
    grid: Grid
    world: ConnectedAxis
    tensor: ConnectedAxis
    tensor_sums: ConnectedAxis
    data: ConnectedAxis
    gradients: ConnectedAxis
    partial_gradients: ConnectedAxis
    pipeline: ConnectedAxis
    forward: ConnectedAxis
    backward: ConnectedAxis
    vocabulary: Axis
    row: ConnectedAxis
    column: ConnectedAxis
    ends: ConnectedAxis
    world_hosts: ConnectedAxis
    pipeline_hosts: ConnectedAxis


Connect = Callable[[str, Tiling], dist.ProcessGroup | None]
"""Returns this rank's group for a use, given the ranks of all groups of the axis."""


def single_rank(device: torch.device) -> Groups:
    """Return the view of a job of one rank, which needs no process group."""
    return connect_grid(Grid(), 0, device, (0, 0), lambda use, tiling: None)


def make_groups(
    grid: Grid, device: torch.device, timeout: timedelta, ends: tuple[int, int] | None = None
) -> Groups:
    """Make the groups of this rank; every rank of the job calls it once, after initialisation.

    Args:
        grid: all ranks of the job.
        device: device on which this rank computes.
        timeout: how long a collective may wait; ``world`` keeps the timeout of the initialisation.
        ends: pipeline ranks of the first and the last stage, by default the first and the last
            rank; the same rank twice if no weights have two copies.
    """
    if grid.world_size == 1:
        return single_rank(device)
    rank = dist.get_rank()
    assert dist.get_world_size() == grid.world_size, f"{dist.get_world_size()} ranks for {grid}"

    def connect(use: str, tiling: Tiling) -> dist.ProcessGroup | None:
        if use == CONTROL and len(tiling[0]) == grid.world_size:
            return dist.group.WORLD
        own, backend = None, "gloo" if use == STATE else None
        for ranks in tiling:  # every rank of the job takes part in making every group
            group = dist.new_group(list(ranks), timeout, backend, group_desc=use)
            own = group if rank in ranks else own
        return own

    ends = (0, grid.pipeline_size - 1) if ends is None else ends
    return connect_grid(grid, rank, device, ends, connect)


def connect_grid(
    grid: Grid, rank: int, device: torch.device, ends: tuple[int, int], connect: Connect
) -> Groups:
    """Return the view of ``rank``, with groups that ``connect`` makes.

    ``connect`` is called in the same order on every rank, once for every group. Axes with the same
    ranks and the same use share a group.
    """
    made: dict[tuple[str, Tiling], dist.ProcessGroup | None] = {}

    def axis(name: str, use: str, tiling: Tiling) -> ConnectedAxis:
        several = tuple(ranks for ranks in tiling if len(ranks) > 1)
        if several and (use, several) not in made:
            made[use, several] = connect(use, several)
        for ranks in several:
            if rank in ranks:
                return ConnectedAxis(name, ranks.index(rank), ranks, made[use, several])
        return ConnectedAxis(name, 0, (rank,))

    pipelines, world = grid.groups("pipeline"), grid.groups("world")
    tensor = grid.groups("tensor")
    at_ends = tuple(tuple(ranks[end] for end in sorted(set(ends))) for ranks in pipelines)
    return Groups(
        device=device,
        grid=grid,
        world=axis("world", CONTROL, world),
        tensor=axis("tensor", "tensor", tensor),
        tensor_sums=axis("tensor", CONTROL, tensor),
        data=axis("data", CONTROL, grid.groups("data")),
        gradients=axis("data", "gradients", grid.groups("data")),
        partial_gradients=axis("tensor", "gradients", tensor),
        pipeline=axis("pipeline", CONTROL, pipelines),
        vocabulary=grid.axis("vocabulary", rank),
        row=axis("tensor", "vocabulary", tensor),
        column=axis("pipeline", "vocabulary", pipelines),
        forward=axis("pipeline", "forward", pipelines),
        backward=axis("pipeline", "forward" if device.type == "cpu" else "backward", pipelines),
        world_hosts=axis("world", STATE, world),
        pipeline_hosts=axis("pipeline", STATE, pipelines),
        ends=axis("ends", "ends", at_ends),
    )
