"""The axes of the grid with their process groups, passed explicitly to all code that communicates.

On NCCL a group is a communicator, and two streams of traffic on one communicator would wait for
each other. Vocabulary collectives, tensor-parallel collectives, reductions of gradients and every
link between stages therefore have groups of their own. On gloo a group is a thread that wakes up a
hundred times a second and takes time from a busy core. There all links share a group, and tags tell
their messages apart. For the same reason, axes with the same ranks share a group if they are used
alike.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist

from megatron.parallel.grid import Axis, AxisName, Grid, Tiling
from megatron.parallel.links import Link
from megatron.parallel.nccl import group_options
from megatron.parallel.settings import BlockSettings
from megatron.parallel.turns import Turns
from megatron.parallel.waits import Waits

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
        turns: the turns of the two passes of a pair, each of which goes on while a collective of
            the other one is under way on this axis; ``None``: a pass waits for its collectives.
        waits: are told when a pass waits for a collective of this axis; ``None``: no pass does.
    """

    group: dist.ProcessGroup | None = None
    turns: Turns | None = None
    waits: Waits | None = field(default=None, compare=False)

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
        context: the ranks that share every sequence, for attention's collectives.
        context_heads: those of them that exchange heads; this rank alone if the ranks of
            ``context`` share sequences in one level.
        context_ring: in two levels, those of them that make a ring.
        data: the ranks that hold the same parameters, in all replicas and for all parts of the
            sequence.
        gradients: the same ranks, for the reductions of gradients while passes run.
        experts: the ranks over which the experts of a layer are spread, for collectives that passes
            wait for.
        expert_tensor: the ranks that share every expert, for the same.
        expert_gradients: the ranks that hold the same parts of the same experts, for the reductions
            of their gradients while passes run.
        partial_gradients: the ranks of ``tensor``, for sums while passes run, of gradients of
            which each rank has a part.
        pipeline: the ranks that share a replica stage by stage, for sums outside the schedule:
            losses and the gradient norm.
        transfers: the pipeline, for the messages of all links that have no group of their own.
        vocabulary: all ranks of a replica with the same part of the sequence, in the order of their
            vocabulary shards. They communicate by rows and columns (``two_level``).
        row: the ranks of ``tensor``, for the vocabulary's collectives within a stage's ranks.
        column: the pipeline, for the vocabulary's collectives between its ranks.
        ends: the ranks of the stages that hold copies of the embedding, for the sums of their
            gradients: the first stage and the last one, and perhaps one between that looks ahead;
            this rank alone if it holds no copy.
        world_hosts: the whole job, for messages between hosts: on CPUs whatever the device.
        pipeline_hosts: the pipeline, for hosts to exchange the sums of the optimizer's step.
        links: the links of this rank that have a group of their own, which is both ends of the
            link.
        turns: the turns of the two passes of a pair; ``None``: passes run one after the other.
        waits: of passes, for collectives of their own.
    """

    device: torch.device
    grid: Grid
    world: ConnectedAxis
    tensor: ConnectedAxis
    tensor_sums: ConnectedAxis
    context: ConnectedAxis
    context_heads: ConnectedAxis
    context_ring: ConnectedAxis
    data: ConnectedAxis
    gradients: ConnectedAxis
    experts: ConnectedAxis
    expert_tensor: ConnectedAxis
    expert_gradients: ConnectedAxis
    partial_gradients: ConnectedAxis
    pipeline: ConnectedAxis
    transfers: ConnectedAxis
    vocabulary: Axis
    row: ConnectedAxis
    column: ConnectedAxis
    ends: ConnectedAxis
    world_hosts: ConnectedAxis
    pipeline_hosts: ConnectedAxis
    links: Mapping[Link, ConnectedAxis] = field(default_factory=dict)
    turns: Turns | None = None
    waits: Waits = field(default_factory=Waits, compare=False)

    @property
    def replica(self) -> tuple[int, int]:
        """The number of this rank's replica, and the number of replicas."""
        return self.data.rank // self.context.size, self.data.size // self.context.size

    def way(self, link: Link) -> tuple[ConnectedAxis, int]:
        """Return the axis that carries ``link`` on this rank, and the other end's place on it."""
        [other] = set(link.ends) - {self.pipeline.rank}
        if link in self.links:
            return self.links[link], link.ends.index(other)
        return self.transfers, other


Connect = Callable[[str, Tiling], dist.ProcessGroup | None]
"""A function that returns this rank's group for a use, given the ranks of all groups of the
axis."""


def single_rank(device: torch.device) -> Groups:
    """Return the view of a job of one rank, which needs no process group."""
    return connect_grid(Grid(), 0, device, (0, 0), lambda use, tiling: None)


def make_groups(
    grid: Grid,
    device: torch.device,
    timeout: timedelta,
    ends: tuple[int, ...] | None = None,
    links: Sequence[Link] = (),
    limits: BlockSettings | None = None,
) -> Groups:
    """Make the groups of this rank; every rank of the job calls it once, after initialisation.

    Args:
        grid: all ranks of the job.
        device: device on which this rank computes.
        timeout: how long a collective may wait; ``world`` keeps the timeout of the initialisation.
        ends: pipeline ranks with copies of the embedding, by default the first and the last rank;
            a single rank if no weights have copies.
        links: links that get a group of their own, in the order in which these are made; by default
            all links share one group.
        limits: most thread blocks of NCCL's communicators, which are then made at once, on
            ``device``. ``None``: the groups have the backend of the initialisation, and no limits.
    """
    if grid.world_size == 1:
        return single_rank(device)
    rank = dist.get_rank()
    assert dist.get_world_size() == grid.world_size, f"{dist.get_world_size()} ranks for {grid}"

    def connect(use: str, tiling: Tiling) -> dist.ProcessGroup | None:
        if limits is None and use == CONTROL and len(tiling[0]) == grid.world_size:
            return dist.group.WORLD
        own, on_device = None, limits is not None and use != STATE
        backend = "gloo" if use == STATE else None
        for ranks in tiling:  # all ranks name every group; only its members make it
            options: dict[str, Any] = {}
            if limits is not None and on_device:
                options = {
                    "pg_options": group_options(use, limits, timeout),
                    "device_id": device,
                }
            group = dist.new_group(list(ranks), timeout, backend, group_desc=use, **options)
            own = group if rank in ranks else own
        return own

    ends = (0, grid.pipeline_size - 1) if ends is None else ends
    return connect_grid(grid, rank, device, ends, connect, links)


_AXES: Final[Mapping[str, tuple[AxisName, str]]] = {
    "world": ("world", CONTROL),
    "tensor": ("tensor", "tensor"),
    "tensor_sums": ("tensor", CONTROL),
    "context": ("context", "context"),
    "context_heads": ("context_heads", "context_heads"),
    "context_ring": ("context_ring", "context_ring"),
    "data": ("data", CONTROL),
    "gradients": ("data", "gradients"),
    "experts": ("experts", "experts"),
    "expert_tensor": ("expert_tensor", "expert_tensor"),
    "expert_gradients": ("expert_data", "gradients"),
    "partial_gradients": ("tensor", "gradients"),
    "pipeline": ("pipeline", CONTROL),
    "row": ("tensor", "vocabulary"),
    "column": ("pipeline", "vocabulary"),
    "transfers": ("pipeline", "transfers"),
    "world_hosts": ("world", STATE),
    "pipeline_hosts": ("pipeline", STATE),
}
"""The fields of ``Groups`` that are axes of the grid: the axis, and the use of its group."""

_WITHIN_PASSES: Final = (
    *("tensor", "context", "context_heads", "context_ring", "experts", "expert_tensor"),
)
"""The fields of axes for whose collectives a pass waits while it runs."""


def connect_grid(
    grid: Grid,
    rank: int,
    device: torch.device,
    ends: tuple[int, ...],
    connect: Connect,
    links: Sequence[Link] = (),
) -> Groups:
    """Return the view of ``rank``, with groups that ``connect`` makes.

    ``connect`` is called in the same order on every rank, once for every group. Axes with the same
    ranks and the same use share a group; a link never shares its group.
    """
    idle, connections = _idle(grid, links), _Connections(rank, connect)
    axes = {
        asked: connections.axis(name, use, () if asked in idle else grid.groups(name))
        for asked, (name, use) in _AXES.items()
    }
    waits = Waits()
    axes |= {name: replace(axes[name], waits=waits) for name in _WITHIN_PASSES}
    pipelines = grid.groups("pipeline")
    at_ends = tuple(tuple(ranks[end] for end in sorted(set(ends))) for ranks in pipelines)
    return Groups(
        device=device,
        grid=grid,
        vocabulary=grid.axis("vocabulary", rank),
        ends=connections.axis("ends", "ends", at_ends),
        links=_connected_links(rank, pipelines, links, connect),
        turns=None,
        waits=waits,
        **axes,
    )


def _idle(grid: Grid, links: Sequence[Link]) -> set[str]:
    """Return the fields of ``Groups`` whose groups no code of this job asks for."""
    idle = set[str]()
    if not grid.spreads_experts:
        idle |= {"experts", "expert_tensor", "expert_gradients"}
    if grid.context_heads_size == 1:
        idle |= {"context_heads", "context_ring"}
    return idle | {"transfers"} if links else idle


@dataclass
class _Connections:
    """The groups of one rank's axes; each is made for the first axis that needs it.

    Attributes:
        rank: the rank.
        connect: makes a group.
        made: the groups so far, by use and ranks.
    """

    rank: int
    connect: Connect
    made: dict[tuple[str, Tiling], dist.ProcessGroup | None] = field(default_factory=dict)

    def axis(self, name: str, use: str, tiling: Tiling) -> ConnectedAxis:
        """Return the axis of ``tiling`` on which the rank is; alone if it is on none."""
        several = tuple(ranks for ranks in tiling if len(ranks) > 1)
        if several and (use, several) not in self.made:
            self.made[use, several] = self.connect(use, several)
        for ranks in several:
            if self.rank in ranks:
                return ConnectedAxis(name, ranks.index(self.rank), ranks, self.made[use, several])
        return ConnectedAxis(name, 0, (self.rank,))


def _connected_links(
    rank: int, pipelines: Tiling, links: Sequence[Link], connect: Connect
) -> Mapping[Link, ConnectedAxis]:
    """Return the links that ``rank`` is an end of, each with its axis."""
    own: dict[Link, ConnectedAxis] = {}
    for link in links:
        pairs = tuple(tuple(ranks[end] for end in link.ends) for ranks in pipelines)
        group = connect(f"transfers {link}", pairs)
        own.update(
            (link, ConnectedAxis(str(link), pair.index(rank), pair, group))
            for pair in pairs
            if rank in pair
        )
    return own


def with_turns(groups: Groups, names: Collection[str]) -> Groups:
    """Return groups on some of whose axes the passes of a pair take turns.

    Args:
        groups: the groups of a rank.
        names: fields of ``Groups``.
    """
    turns = Turns()
    own = {name: replace(getattr(groups, name), turns=turns) for name in names}
    return replace(groups, turns=turns, **own)
