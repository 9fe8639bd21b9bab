"""Where the parameters of all buckets of a rank lie, as their optimizer requires.

AdamW and SGD update each element by itself, so a shard may be any rows. Muon needs whole matrices.
In buckets for Muon no boundary cuts a matrix, each shard has its own matrices, and shards differ in
size. Shards need no padding to equal sizes, even if there are fewer matrices than replicas.
"""

from collections.abc import Callable, Sequence
from math import prod

from megatron.model.ownership import OwnedParameter
from megatron.optimizer.bucket import VECTOR, BucketLayout, Shape, lay_out
from megatron.parallel.groups import ConnectedAxis

KeepsWhole = Callable[[OwnedParameter], bool]
"""Returns whether one replica must update all of a parameter."""


def bucket_layouts(
    buckets: Sequence[Sequence[OwnedParameter]], replicas: int, keeps_whole: KeepsWhole
) -> list[BucketLayout]:
    """Lay out the parameters of every bucket.

    Args:
        buckets: of a rank. Each bucket keeps all of its parameters whole, or none. It has a shard
            for every rank over which its gradients are summed.
        replicas: number of these ranks, for parameters without an ``axis``.
        keeps_whole: tells which parameters must not be cut.
    """
    filled: dict[ConnectedAxis | None, list[int]] = {}
    layouts = []
    for bucket in buckets:
        shapes = [tuple(owned.parameter.shape) for owned in bucket]
        axis, shards = bucket[0].axis, bucket[0].sharers(replicas)
        if shards > 1 and keeps_whole(bucket[0]):
            assert all(map(keeps_whole, bucket)), "a bucket is kept whole, or is not"
            held = filled.get(axis, [0] * shards)
            layout = lay_out_whole(shapes, held)
            filled[axis] = [old + new for old, new in zip(held, layout.sizes, strict=True)]
        else:
            layout = lay_out(shapes, shards)
        layouts.append(layout)
    return layouts


def lay_out_whole(shapes: Sequence[Shape], filled: Sequence[int]) -> BucketLayout:
    """Lay out parameters side by side, so that no shard boundary cuts a parameter.

    Parameters go, largest first, to the shard with the fewest elements so far (Graham, SIAM J.
    Appl. Math. 17, 1969: the fullest shard is at most 4/3 as large as in the best assignment).

    Args:
        shapes: of the parameters.
        filled: elements that every shard has in other buckets.
    """
    sizes = [-(-prod(shape) // VECTOR) * VECTOR for shape in shapes]
    held = [list[int]() for _ in filled]
    total = list(filled)
    for index in sorted(range(len(shapes)), key=lambda i: -sizes[i]):
        shard = total.index(min(total))
        held[shard].append(index)
        total[shard] += sizes[index]
    starts, bounds = [0] * len(shapes), [0]
    for own in held:
        end = bounds[-1]
        for index in own:
            starts[index] = end
            end += sizes[index]
        bounds.append(end)
    return BucketLayout(tuple(starts), tuple(bounds))
