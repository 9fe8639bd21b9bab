"""The buckets of a run that is not started: its ranks' models are built without any memory.

All tensor-parallel ranks of a pipeline rank have equal buckets, so only the first rank is built.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Final

import torch

from megatron.layers.eight_bit_settings import EightBitSettings
from megatron.layers.site import Site
from megatron.model.ownership import OwnedParameter
from megatron.model.placement import Placement
from megatron.model.settings import ModelSettings
from megatron.model.stage import RankModel
from megatron.optimizer.bucket import BucketLayout, Shape, row_length
from megatron.optimizer.bucket_layouts import KeepsWhole, bucket_layouts
from megatron.optimizer.make import keeps_whole
from megatron.parallel.experts import ExpertParallel, GatheringExperts
from megatron.parallel.grid import AxisName
from megatron.parallel.groups import ConnectedAxis
from megatron.parallel.settings import TensorRankSettings
from megatron.parallel.tensor import tensor_parallel
from megatron.planning.count.apart import apart
from megatron.planning.count.run import role_of
from megatron.planning.count.subject import Subject
from megatron.planning.planned_run import RunPlan
from megatron.run.parallel_config import ParallelConfig
from megatron.run.run_config import RunConfig
from megatron.runtime.buckets import described, gathered_size, make_buckets
from megatron.runtime.embedding_copies import ranks_with_copies
from megatron.schedules.buckets import Bucket
from megatron.schedules.plan import Plan

_CACHED: Final = 512
"""Ranks whose buckets a cache keeps."""
_AXES: Final[tuple[AxisName, ...]] = ("experts", "expert_tensor", "expert_data")


@dataclass(frozen=True)
class RankBuckets:
    """The buckets of one pipeline rank.

    Attributes:
        buckets: the buckets in the form that a program needs.
        parameters: elements of the rank's parameters.
        padded: elements of all buckets, padding included.
        largest: elements of the largest bucket, padding included.
        fullest: elements that the replica with the largest part updates.
        mean: elements that a replica updates in the mean.
        passed_on: elements that a rank sends along a ring to sum all gradients up once.
        gathered: as ``passed_on``, of a gathering; an element in 8 bits counts as half of one.
        narrow: elements that are gathered in 8 bits, padding included.
        narrow_own: elements of them that the replica with the largest part updates.
        replicas: number of replicas.
        laid_out: layout of every bucket, with the names and shapes of its parameters. Ranks whose
            layers are alike share them: the names are those of the layers of one of these ranks.
    """

    buckets: list[Bucket]
    parameters: int
    padded: int
    largest: int
    fullest: int
    mean: float
    passed_on: float
    gathered: float
    narrow: int
    narrow_own: int
    replicas: int
    laid_out: Sequence[tuple[BucketLayout, Sequence[tuple[str, Shape]]]]

    @cached_property
    def parts(self) -> Sequence[Sequence[tuple[str, int]]]:
        """Name and elements of every part of a parameter in the shards of every replica."""
        return [_parts(self.laid_out, replica) for replica in range(self.replicas)]


@dataclass(frozen=True)
class _Asked:
    """A rank whose buckets are wanted; a cache compares all but ``plan`` and ``placement``.

    Attributes:
        role: equal for ranks with equal parameters (``role_of``).
        model: the model.
        dtype: of the weights.
        eight_bits: the layers that multiply in 8 bits, if replicas gather their weights so.
        tensor: tensor-parallel ranks.
        experts: ranks of the axes of experts, as the first rank of a stage sees them; ``None``:
            experts are not spread.
        replicas: number of ranks with the same parameters.
        limit: size of a bucket; ``None``: by ``number``, or as usual.
        number: number of buckets; ``None``: by ``limit``.
        keeps_whole: tells which parameters the optimizer needs whole.
        holders: ranks with copies of the embedding.
        plan: tells which passes there are.
        placement: the parts of the model on the rank.
    """

    role: Hashable
    model: ModelSettings
    dtype: torch.dtype
    eight_bits: EightBitSettings | None
    tensor: TensorRankSettings
    experts: tuple[tuple[int, ...], ...] | None
    replicas: int
    limit: int | None
    number: int | None
    keeps_whole: KeepsWhole
    holders: tuple[int, ...]
    plan: Plan = field(compare=False)
    placement: Placement = field(compare=False)


def run_buckets(config: RunConfig, run_plan: RunPlan) -> list[RankBuckets]:
    """Return the buckets of every pipeline rank."""
    parallel, plan, subject = config.parallel, run_plan.plan, Subject.of(config)
    replicas, found = parallel.replicas, list[RankBuckets]()
    experts, whole = _expert_ranks(parallel), keeps_whole(config.optimizer)
    for rank in range(plan.ranks):
        placement = subject.placement(plan, run_plan.layers, rank)
        asked = _Asked(
            role_of(subject, plan, rank, placement),
            config.model,
            config.train.dtype,
            subject.eight_bits if subject.gathers_eight_bits else None,
            parallel.tensor,
            experts,
            replicas.size,
            replicas.ddp_bucket_size,
            replicas.ddp_num_buckets,
            whole,
            ranks_with_copies(plan, tied=config.model.vocabulary.tie_embeddings),
            plan,
            placement,
        )
        found.append(_of_rank(asked))
    return found


@lru_cache(_CACHED)
def _of_rank(asked: _Asked) -> RankBuckets:
    plan, replicas, whole = asked.plan, asked.replicas, asked.keeps_whole
    model = _model(asked)
    narrow = model.gathered_weights()
    buckets = make_buckets(model, plan, replicas, asked.limit, asked.number, whole, narrow)
    layouts = bucket_layouts(buckets, replicas, whole)
    sizes = [gathered_size(bucket, narrow) for bucket in buckets]
    passed_on = [layout.size * (1 - 1 / len(layout.sizes)) for layout in layouts]
    in_eight = [one for one, size in zip(layouts, sizes, strict=True) if size < 1]
    return RankBuckets(
        described(buckets, model, plan, replicas, narrow),
        sum(owned.parameter.numel() for bucket in buckets for owned in bucket),
        sum(layout.size for layout in layouts),
        max(layout.size for layout in layouts),
        _most_updated(buckets, layouts),
        sum(layout.size / len(layout.sizes) for layout in layouts),
        sum(passed_on),
        sum(size * sent for size, sent in zip(sizes, passed_on, strict=True)),
        sum(layout.size for layout in in_eight),
        sum(max(layout.sizes) for layout in in_eight),
        replicas,
        [
            (layout, [(owned.name, tuple(owned.parameter.shape)) for owned in bucket])
            for layout, bucket in zip(layouts, buckets, strict=True)
        ],
    )


def _model(asked: _Asked) -> RankModel:
    """Return the model of a rank, without any memory."""
    device = torch.device("meta")
    axis = ConnectedAxis("tensor", 0, tuple(range(asked.tensor.size)))
    site = Site(
        device,
        asked.dtype,
        tensor=tensor_parallel(axis, device, sequence_parallel=asked.tensor.sequence_parallel),
        given_experts=_experts(asked.experts),
        eight_bits=asked.eight_bits,
    )
    return apart(lambda: RankModel(asked.model, asked.placement, site))


def _parts(
    laid_out: Sequence[tuple[BucketLayout, Sequence[tuple[str, Shape]]]], replica: int
) -> list[tuple[str, int]]:
    """Return name and elements of the parts that a replica updates if the optimizer is sharded.

    Which ranks share experts is left open: of fewer shards than replicas, each has several.
    """
    found = []
    for layout, named in laid_out:
        shapes = [shape for _, shape in named]
        for index, first, end in layout.rows(shapes, replica % len(layout.sizes)):
            found.append((named[index][0], (end - first) * row_length(shapes[index])))
    return found


def _expert_ranks(parallel: ParallelConfig) -> tuple[tuple[int, ...], ...] | None:
    """Return the ranks of the axes of experts, as the first rank of a stage sees them."""
    grid = parallel.grid
    return tuple(grid.axis(name, 0).ranks for name in _AXES) if grid.spreads_experts else None


def _experts(ranks: tuple[tuple[int, ...], ...] | None) -> ExpertParallel | None:
    """Return how experts are spread; tokens do not travel here."""
    if ranks is None:
        return None
    experts, tensor, data = (
        ConnectedAxis(name, 0, own) for name, own in zip(_AXES, ranks, strict=True)
    )
    return GatheringExperts(experts, tensor, data)


def _most_updated(
    buckets: Sequence[Sequence[OwnedParameter]], layouts: Sequence[BucketLayout]
) -> int:
    """Return the elements that the rank with the largest shards updates.

    Shards of different axes may be largest on different ranks; the result is then too large.
    """
    filled: dict[ConnectedAxis | None, list[int]] = {}
    for bucket, layout in zip(buckets, layouts, strict=True):
        held = filled.get(bucket[0].axis, [0] * len(layout.sizes))
        filled[bucket[0].axis] = [a + b for a, b in zip(held, layout.sizes, strict=True)]
    return sum(map(max, filled.values()))
