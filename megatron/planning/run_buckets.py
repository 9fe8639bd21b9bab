"""The buckets of a run that is not started: its ranks' models are built without any memory.

All tensor-parallel ranks of a pipeline rank have equal buckets, so only the first rank is built.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron.config.parallel_config import ParallelConfig
from megatron.config.run_config import RunConfig
from megatron.layers.site import Site
from megatron.model.ownership import OwnedParameter
from megatron.model.stage import RankModel
from megatron.optimizer.bucket import BucketLayout, row_length
from megatron.optimizer.bucket_layouts import bucket_layouts
from megatron.optimizer.make import keeps_whole
from megatron.parallel.experts import ExpertParallel, GatheringExperts
from megatron.parallel.grid import AxisName
from megatron.parallel.groups import ConnectedAxis
from megatron.parallel.tensor import tensor_parallel
from megatron.planning.count.subject import Subject
from megatron.planning.planned_run import RunPlan
from megatron.runtime.buckets import described, gathered_size, make_buckets
from megatron.schedules.buckets import Bucket


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
        parts: name and elements of every part of a parameter in the shards of every replica.
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
    parts: Sequence[Sequence[tuple[str, int]]]


def run_buckets(config: RunConfig, run_plan: RunPlan) -> list[RankBuckets]:
    """Return the buckets of every pipeline rank."""
    return [_of_rank(config, run_plan, rank) for rank in range(run_plan.plan.ranks)]


def _of_rank(config: RunConfig, run_plan: RunPlan, rank: int) -> RankBuckets:
    parallel, plan = config.parallel, run_plan.plan
    subject = Subject.of(config)
    placement = subject.placement(plan, run_plan.layers, rank)
    device = torch.device("meta")
    axis = ConnectedAxis("tensor", 0, tuple(range(parallel.tensor_size)))
    tensor = tensor_parallel(axis, device, sequence_parallel=parallel.sequence_parallel)
    site = Site(
        device,
        config.train.dtype,
        tensor=tensor,
        given_experts=_experts(parallel),
        eight_bits=subject.eight_bits if subject.gathers_eight_bits else None,
    )
    model = RankModel(config.model, placement, site)
    replicas = parallel.replicas
    whole, narrow = keeps_whole(config.optimizer), model.gathered_weights()
    buckets = make_buckets(
        model, plan, replicas.size, replicas.bucket_size, replicas.buckets, whole, narrow
    )
    layouts = bucket_layouts(buckets, replicas.size, whole)
    sizes = [gathered_size(bucket, narrow) for bucket in buckets]
    passed_on = [layout.size * (1 - 1 / len(layout.sizes)) for layout in layouts]
    in_eight = [one for one, size in zip(layouts, sizes, strict=True) if size < 1]
    return RankBuckets(
        described(buckets, model, plan, replicas.size, narrow),
        sum(owned.parameter.numel() for bucket in buckets for owned in bucket),
        sum(layout.size for layout in layouts),
        max(layout.size for layout in layouts),
        _most_updated(buckets, layouts),
        sum(layout.size / len(layout.sizes) for layout in layouts),
        sum(passed_on),
        sum(size * sent for size, sent in zip(sizes, passed_on, strict=True)),
        sum(layout.size for layout in in_eight),
        sum(max(layout.sizes) for layout in in_eight),
        [_parts(buckets, layouts, replica) for replica in range(replicas.size)],
    )


def _parts(
    buckets: Sequence[Sequence[OwnedParameter]], layouts: Sequence[BucketLayout], replica: int
) -> list[tuple[str, int]]:
    """Return name and elements of the parts that a replica updates if the optimizer is sharded.

    Which ranks share experts is left open: of fewer shards than replicas, each has several.
    """
    found = []
    for bucket, layout in zip(buckets, layouts, strict=True):
        shapes = [tuple(owned.parameter.shape) for owned in bucket]
        for index, first, end in layout.rows(shapes, replica % len(layout.sizes)):
            found.append((bucket[index].name, (end - first) * row_length(shapes[index])))
    return found


def _experts(parallel: ParallelConfig) -> ExpertParallel | None:
    """Return the ranks that have the experts, as the first rank of a stage sees them."""
    grid = parallel.grid
    if not grid.spreads_experts:
        return None
    names: tuple[AxisName, ...] = ("experts", "expert_tensor", "expert_data")
    experts, tensor, data = (ConnectedAxis(name, 0, grid.axis(name, 0).ranks) for name in names)
    return GatheringExperts(experts, tensor, data)  # tokens do not travel here


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
