"""All ranks of a job as coordinates, and the axes from which groups are made: plain arithmetic.

A rank has a place in four directions: tensor, context, data and pipeline parallelism. The ranks of
one group differ in one direction, or in several. The groups of one axis together hold every rank of
the job once.

Experts (of mixtures) have coordinates of their own. They fold over the same ranks: the ranks of a
stage, in order, are also expert-tensor x expert x expert-data ranks.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal, get_args

Order = Literal["tp-dp-pp", "tp-pp-dp"]
"""The order in which the coordinates of consecutive ranks change, the fastest first.

The second is Megatron's ``--use-tp-pp-dp-mapping``. In both, as in Megatron, tensor-parallel ranks
are adjacent, and the ranks that share a sequence (cp) come next."""

ORDERS: Final[tuple[Order, ...]] = get_args(Order)

AxisName = Literal[
    "tensor",
    "context",
    "context_heads",
    "context_ring",
    "data",
    "pipeline",
    "vocabulary",
    "world",
    "expert_tensor",
    "experts",
    "expert_data",
]

Tiling = tuple[tuple[int, ...], ...]
"""The ranks of every group of an axis, by place; every rank of the job is in one group."""

_VARYING: Final[dict[str, tuple[str, ...]]] = {
    "tensor": ("tensor",),
    "context": ("context",),
    "context_heads": ("heads",),
    "context_ring": ("ring",),
    "data": ("context", "data"),
    "pipeline": ("pipeline",),
    "vocabulary": ("tensor", "pipeline"),
    "world": ("tensor", "context", "data", "pipeline"),
    "expert_tensor": ("expert_tensor",),
    "experts": ("experts",),
    "expert_data": ("expert_data",),
}
"""The coordinates that differ within a group of each axis."""

_OF_LEVELS: Final = ("context_heads", "context_ring")
"""The axes into which the context axis is divided."""

_OF_EXPERTS: Final = ("expert_tensor", "experts", "expert_data")
"""The axes whose groups are slices of the experts' coordinates."""

_CACHED: Final = 128
"""Axes whose groups are kept: the prediction of a run asks for each of them several times."""


@dataclass(frozen=True)
class Axis:
    """One rank's view of a group.

    Attributes:
        name: name of the axis.
        rank: this rank's place in the group, 0 to ``size`` - 1.
        ranks: the group's ranks, as numbered in the job, by place.
    """

    name: str
    rank: int
    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return len(self.ranks)


@dataclass(frozen=True)
class Coordinates:
    """Where a rank is in the grid.

    Attributes:
        tensor: tensor-parallel rank tp, 0 to t - 1.
        data: data-parallel rank dp, the replica, 0 to d - 1.
        pipeline: pipeline rank pp, 0 to p - 1.
        context: context-parallel rank cp, the part of every sequence, 0 to c - 1.
    """

    tensor: int
    data: int
    pipeline: int
    context: int = 0


@dataclass(frozen=True)
class LevelCoordinates:
    """Where a rank is in the grid, if the ranks that share a sequence do so in two levels.

    Attributes:
        tensor: as in ``Coordinates``, like ``data`` and ``pipeline``.
        data: replica.
        pipeline: pipeline rank.
        heads: place among adjacent context-parallel ranks, which exchange heads.
        ring: place on the ring of such sets of ranks.
    """

    tensor: int
    data: int
    pipeline: int
    heads: int
    ring: int


@dataclass(frozen=True)
class ExpertCoordinates:
    """The coordinates of a rank among the ranks of its stage, as experts number them.

    Attributes:
        expert_tensor: which part of every expert it has, 0 to etp - 1.
        experts: which experts it has, 0 to e - 1.
        expert_data: which copy of them.
        pipeline: pipeline rank pp, 0 to p - 1.
    """

    expert_tensor: int
    experts: int
    expert_data: int
    pipeline: int


@dataclass(frozen=True)
class Grid:
    """The shape of a job and the order of its ranks.

    Attributes:
        tensor_size: tensor-parallel ranks t.
        data_size: data-parallel ranks d: replicas of the model.
        pipeline_size: pipeline ranks p.
        order: order of the coordinates, the fastest first.
        context_size: context-parallel ranks c, which share every sequence.
        expert_size: ranks e over which the experts of a layer are spread.
        given_expert_tensor_size: ranks etp that share an expert; ``None``: t.
        context_heads_size: adjacent context-parallel ranks that exchange heads, a divisor of c.

    Raises:
        ValueError: a size below 1, an unknown order, or ranks of a stage that do not divide into
            groups of e x etp.
    """

    tensor_size: int = 1
    data_size: int = 1
    pipeline_size: int = 1
    order: Order = "tp-dp-pp"
    context_size: int = 1
    expert_size: int = 1
    given_expert_tensor_size: int | None = None
    context_heads_size: int = 1

    def __post_init__(self) -> None:
        sizes = (self.tensor_size, self.data_size, self.pipeline_size, self.context_size)
        if min(sizes) < 1:
            raise ValueError(f"a grid of {sizes} (t, d, p, c) ranks: every size must be at least 1")
        if self.order not in ORDERS:
            raise ValueError(f"order {self.order!r}: must be tp-dp-pp or tp-pp-dp")
        if self.context_size % self.context_heads_size:
            raise ValueError(
                f"{self.context_size} context-parallel ranks do not divide into sets of "
                f"{self.context_heads_size}"
            )
        if (
            min(self.expert_size, self.expert_tensor_size) < 1
            or self.stage_size % self.expert_block
        ):
            raise ValueError(
                f"the {self.stage_size} ranks of a stage do not divide into groups of "
                f"{self.expert_size} x {self.expert_tensor_size} (e, etp) ranks"
            )

    @property
    def expert_tensor_size(self) -> int:
        """Ranks etp that share an expert."""
        given = self.given_expert_tensor_size
        return self.tensor_size if given is None else given

    @property
    def expert_block(self) -> int:
        """Ranks e x etp that together have all experts of a layer once."""
        return self.expert_size * self.expert_tensor_size

    @property
    def stage_size(self) -> int:
        """Ranks of a stage in all replicas, t x c x d."""
        return self.tensor_size * self.context_size * self.data_size

    @property
    def expert_copies(self) -> int:
        """Ranks that have the same parts of the same experts."""
        return self.stage_size // self.expert_block

    @property
    def spreads_experts(self) -> bool:
        """Whether experts are spread over ranks in another way than the rest of their layer."""
        return self.expert_size > 1 or self.expert_tensor_size != self.tensor_size

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.tensor_size * self.context_size * self.data_size * self.pipeline_size

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of a rank of the job."""
        assert 0 <= rank < self.world_size, f"no rank {rank} among {self.world_size}"
        rest, tensor = divmod(rank, self.tensor_size)
        rest, context = divmod(rest, self.context_size)
        if self.order == "tp-dp-pp":
            pipeline, data = divmod(rest, self.data_size)
        else:
            data, pipeline = divmod(rest, self.pipeline_size)
        return Coordinates(tensor, data, pipeline, context)

    def level_coordinates(self, rank: int) -> LevelCoordinates:
        """Return the coordinates of a rank of the job, with two levels of context parallelism."""
        at = self.coordinates(rank)
        ring, heads = divmod(at.context, self.context_heads_size)
        return LevelCoordinates(at.tensor, at.data, at.pipeline, heads, ring)

    def expert_coordinates(self, rank: int) -> ExpertCoordinates:
        """Return the coordinates of a rank of the job among the experts.

        The place within a stage is tp + t (cp + c dp) in both orders of ranks. Its expert-tensor
        coordinate changes fastest, then its expert coordinate, as in Megatron-Core.
        """
        at = self.coordinates(rank)
        place = at.tensor + self.tensor_size * (at.context + self.context_size * at.data)
        block, within = divmod(place, self.expert_block)
        experts, tensor = divmod(within, self.expert_tensor_size)
        return ExpertCoordinates(tensor, experts, block, at.pipeline)

    def groups(self, name: AxisName) -> Tiling:
        """Return the ranks of every group of an axis, by place; together they tile the job.

        A group of the data axis holds all ranks with the same parameters, in all replicas and for
        all parts of the sequence; these ranks add up their gradients. The place of a rank is
        dp * c + cp. A group of the vocabulary axis holds the ranks that share a microbatch's part
        of the sequence. The place of a rank is k = pp * t + tp, the index of its shard. A group of
        the axis ``experts`` holds ranks with different experts of a layer, a group of
        ``expert_tensor`` the ranks that share an expert, and a group of ``expert_data`` the ranks
        with the same parts of the same experts, which add up the gradients of these. A group of
        ``context_heads`` holds adjacent ranks of a group of ``context``, and a group of
        ``context_ring`` the ranks with the same place in these. On every axis the ranks of a group
        ascend.
        """
        return _groups(self, name)

    def axis(self, name: AxisName, rank: int) -> Axis:
        """Return the view that a rank of the job has of an axis."""
        [ranks] = [ranks for ranks in self.groups(name) if rank in ranks]
        return Axis(name, ranks.index(rank), ranks)

    def vocabulary_rank(self, pipeline: int, tensor: int = 0) -> int:
        """Return k = pp * t + tp: the place on the vocabulary axis, and the index of the shard."""
        return pipeline * self.tensor_size + tensor


@lru_cache(_CACHED)
def _groups(grid: Grid, name: AxisName) -> Tiling:
    """Return the groups of ``Grid.groups``, in the order of their first ranks.

    A rank's number has its coordinates as digits, so no rank's coordinates are asked for.
    """
    if name not in _OF_EXPERTS:
        return _tiled(_digits(grid, name in _OF_LEVELS), _VARYING[name])
    inner = grid.tensor_size * grid.context_size
    sizes = {
        "expert_tensor": grid.expert_tensor_size,
        "experts": grid.expert_size,
        "expert_data": grid.expert_copies,
        "pipeline": grid.pipeline_size,
    }
    found = _tiled(sizes, _VARYING[name])
    if grid.order == "tp-dp-pp":
        return found

    def rank(number: int) -> int:
        """Return the rank with a place among the experts of its stage, numbered by stages."""
        pipeline, place = divmod(number, grid.stage_size)
        data, within = divmod(place, inner)
        return within + inner * (pipeline + grid.pipeline_size * data)

    return tuple(sorted(tuple(map(rank, numbers)) for numbers in found))


def _digits(grid: Grid, in_levels: bool) -> Mapping[str, int]:
    """Return the number of values of every coordinate of a rank, the fastest coordinate first."""
    heads, context = grid.context_heads_size, {"context": grid.context_size}
    if in_levels:
        context = {"heads": heads, "ring": grid.context_size // heads}
    outer = {"data": grid.data_size, "pipeline": grid.pipeline_size}
    if grid.order == "tp-pp-dp":
        outer = {"pipeline": grid.pipeline_size, "data": grid.data_size}
    return {"tensor": grid.tensor_size, **context, **outer}


def _tiled(digits: Mapping[str, int], varying: Collection[str]) -> Tiling:
    """Return groups of ascending numbers that differ in some of their digits.

    Args:
        digits: the number of values of every digit, the fastest digit first.
        varying: the digits that differ within a group.
    """
    first, steps, worth = [0], [0], 1
    for name, size in digits.items():
        values = range(0, worth * size, worth)
        if name in varying:
            steps = [value + step for value in values for step in steps]
        else:
            first = [value + number for value in values for number in first]
        worth *= size
    return tuple(tuple([number + step for step in steps]) for number in first)
