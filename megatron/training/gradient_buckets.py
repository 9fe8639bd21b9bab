"""The gradients of a rank in buckets, and what it does with them together with its replicas."""

from collections.abc import Sequence
from typing import NamedTuple

from megatron.config.replicas import ReplicaConfig
from megatron.config.run_config import RunConfig
from megatron.model.ownership import OwnedParameter
from megatron.model.stage import RankModel
from megatron.optimizer.bucket import Bucket, BucketLayout
from megatron.optimizer.bucket_layouts import bucket_layouts
from megatron.optimizer.make import keeps_whole
from megatron.optimizer.parameters import OptimizedParameter
from megatron.optimizer.sharded import ShardedOptimizer
from megatron.runtime.buckets import make_buckets
from megatron.runtime.pipeline import Replication
from megatron.schedules.plan import Plan


class Bucketed(NamedTuple):
    """This rank's gradients in buckets.

    Attributes:
        owned: the parameters of every bucket.
        layouts: where each parameter lies in its bucket.
        buckets: with their memory.
    """

    owned: Sequence[Sequence[OwnedParameter]]
    layouts: Sequence[BucketLayout]
    buckets: tuple[Bucket, ...]

    def replication(
        self, replicas: ReplicaConfig, sharded: ShardedOptimizer | None, *, deferred: bool
    ) -> Replication:
        """Return what is done with the buckets together with replicas.

        Args:
            replicas: what runs beside the passes, and in which type.
            sharded: the optimizer, if its state is spread over replicas.
            deferred: whether its steps are taken in the next iteration.
        """
        return Replication(
            self.owned,
            self.buckets,
            [layout.sizes for layout in self.layouts],
            overlap_reduce=replicas.overlap,
            dtype=replicas.reduce_dtype,
            optimizer=sharded,
            deferred=deferred,
            overlap_gather=replicas.overlap_gather,
        )


def bucketed(config: RunConfig, model: RankModel, plan: Plan, ranks: int) -> Bucketed:
    """Put this rank's gradients into buckets.

    Args:
        config: sizes and type of the buckets, and what the optimizer keeps whole.
        model: the part of the model that this rank owns.
        plan: tells after which passes a gradient is complete.
        ranks: that reduce the buckets together.
    """
    replicas, whole_ones = config.parallel.replicas, keeps_whole(config.optimizer)
    owned = make_buckets(model, plan, ranks, replicas.bucket_size, replicas.buckets, whole_ones)
    layouts = bucket_layouts(owned, ranks, whole_ones)
    buckets = tuple(
        Bucket(
            list(map(OptimizedParameter.of, bucket)),
            model.kernels,
            layout,
            together=replicas.shard_optimizer,
            gradient_dtype=config.train.gradient_dtype,
        )
        for bucket, layout in zip(owned, layouts, strict=True)
    )
    return Bucketed(owned, layouts, buckets)
