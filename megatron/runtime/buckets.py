"""Which gradients of a rank are reduced together over the replicas, and after which passes.

Norms and biases get their gradients in B, matrices in W if the backward is split, and the shards of
the vocabulary in IB and T. Gradients that are complete after the same passes share buckets.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

from megatron.layers.linear import Linear
from megatron.model.ownership import OwnedParameter
from megatron.model.stage import RankModel
from megatron.schedules.buckets import Bucket
from megatron.schedules.passes import PassKind
from megatron.schedules.plan import Plan

DEFAULT_BUCKET_SIZE: Final = 40_000_000
"""Parameters of a bucket, as in Megatron, where the user asks for no other size."""

Touch = tuple[PassKind, int]
"""Kind and chunk of a pass."""


def make_buckets(
    model: RankModel, plan: Plan, limit: int | None = None, number: int | None = None
) -> list[tuple[OwnedParameter, ...]]:
    """Spread the parameters of this rank over buckets.

    Args:
        model: the part of the model that this rank owns.
        plan: tells which passes there are.
        limit: parameters after which a bucket is full, by default ``DEFAULT_BUCKET_SIZE``. A
            parameter is not cut.
        number: of buckets, about, as no parameter is cut; in place of ``limit``.
    """
    touched = touches(model, plan)
    together: dict[frozenset[Touch], list[OwnedParameter]] = defaultdict(list)
    for owned in model.owned_parameters():
        together[touched[id(owned.parameter)]].append(owned)
    if number is not None:
        limit = sum(p.numel() for p in model.parameters()) // number
    limit = DEFAULT_BUCKET_SIZE if limit is None else limit
    return [bucket for parameters in together.values() for bucket in _filled(parameters, limit)]


def described(
    buckets: Sequence[Sequence[OwnedParameter]], model: RankModel, plan: Plan
) -> list[Bucket]:
    """Return what a program must know of this rank's buckets.

    Args:
        buckets: from ``make_buckets``, maybe of another plan with the same stages.
        model: the part of the model that this rank owns.
        plan: the plan of the program.
    """
    touched = touches(model, plan)
    sizes = [sum(owned.parameter.numel() for owned in bucket) for bucket in buckets]
    return [
        Bucket(
            frozenset(touch for owned in bucket for touch in touched[id(owned.parameter)]),
            size / sum(sizes),
        )
        for bucket, size in zip(buckets, sizes, strict=True)
    ]


def touches(model: RankModel, plan: Plan) -> dict[int, frozenset[Touch]]:
    """Return the passes that add to the gradient of every parameter, by its ``id``."""
    products: PassKind = "W" if plan.split_backward else "B"
    found: dict[int, set[Touch]] = defaultdict(set)
    for chunk, layers in enumerate(model.chunks):
        matrices = {id(part.weight) for part in layers.modules() if isinstance(part, Linear)}
        for parameter in layers.parameters():
            kind: PassKind = products if id(parameter) in matrices else "B"
            found[id(parameter)].add((kind, chunk))
    placement, sharded = model.placement, plan.treatment.is_sharded
    if placement.first_chunk is not None and model.positions is not None:
        found[id(model.positions.weight)].add(("B", placement.first_chunk))
    if placement.last_chunk is not None and model.final_norm is not None:
        for parameter in model.final_norm.parameters():
            found[id(parameter)].add(("B", placement.last_chunk))
    if model.input_layer is not None:
        by: Touch = ("IB", 0) if sharded else ("B", _chunk(placement.first_chunk))
        found[id(model.input_layer.weight)].add(by)
    if model.output_layer is not None:
        by = ("T", 0) if sharded else (products, _chunk(placement.last_chunk))
        found[id(model.output_layer.weight)].add(by)
    return {parameter: frozenset(passes) for parameter, passes in found.items()}


def _chunk(chunk: int | None) -> int:
    assert chunk is not None, "a whole vocabulary layer is where its stage is"
    return chunk


def _filled(
    parameters: Sequence[OwnedParameter], limit: int
) -> Iterator[tuple[OwnedParameter, ...]]:
    """Yield buckets with parameters in the order in which the backward comes to them."""
    bucket: list[OwnedParameter] = []
    size = 0
    for owned in reversed(parameters):
        bucket.append(owned)
        size += owned.parameter.numel()
        if size >= limit:
            yield tuple(bucket)
            bucket, size = [], 0
    if bucket:
        yield tuple(bucket)
