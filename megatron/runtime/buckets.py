"""Which parameters of a rank share a bucket, and which passes touch and read them.

B forms the gradients of norms and biases. W forms the gradients of matrices if the backward is
split and their layer leaves the product to W. IB and T form the gradients of vocabulary shards.
Gradients that are complete after the same passes share buckets, as far as their rows fit together
(``optimizer.bucket``).

All gradients of a bucket are summed over the same ranks, mostly over the replicas. Some gradients
are first summed within a replica: over the tensor-parallel ranks, or over the stages with copies of
the embedding's matrix. The parameters of such gradients have buckets of their own.
"""

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Final, Literal, NamedTuple

from torch import nn

from megatron.layers.vocabulary.input_layer import InputLayer
from megatron.layers.weight_gradients import deferring_parts
from megatron.model.ownership import WORD_EMBEDDINGS, OwnedParameter
from megatron.model.stage import RankModel
from megatron.optimizer.bucket import row_length, share_a_bucket
from megatron.optimizer.bucket_layouts import KeepsWhole
from megatron.parallel.groups import ConnectedAxis
from megatron.runtime.embedding_copies import ranks_with_copies
from megatron.schedules.buckets import Bucket, Touch
from megatron.schedules.passes import PassKind
from megatron.schedules.plan import Plan

DEFAULT_BUCKET_SIZE: Final = 400_000_000
DEFAULT_PER_REPLICA: Final = 1_000_000
"""Default number of parameters in a bucket, and the least number of parameters per replica.

A ring collective takes time by bytes and by steps, and has as many steps as replicas, so small
buckets are slow. In a pipeline a bucket is complete only after the last pass of its chunk, so small
buckets hide no more communication (docs/benchmarks/2026-11-22-replicas)."""


Summands = Literal["tensor", "ends"]
"""Ranks of one replica that have summands of the same gradients: ``tensor``, the tensor-parallel
ranks of a stage, or ``ends``, the stages with copies of the embedding's matrix."""


class _Alike(NamedTuple):
    """The properties that all parameters of a bucket share.

    Attributes:
        touched: passes after which the gradients are complete.
        summands: ranks of the replica that have summands of the gradients.
        whole: whether shards must not cut the parameters.
        axis: ranks over which the gradients are summed afterwards; see ``OwnedParameter``.
        narrow: whether the parameters are gathered in 8 bits.
    """

    touched: frozenset[Touch]
    summands: tuple[Summands, ...]
    whole: bool
    axis: ConnectedAxis | None
    narrow: bool


def make_buckets(
    model: RankModel,
    plan: Plan,
    replicas: int,
    limit: int | None = None,
    number: int | None = None,
    keeps_whole: KeepsWhole = lambda owned: False,
    narrow: Container[int] = (),
) -> list[tuple[OwnedParameter, ...]]:
    """Spread the parameters of this rank over buckets.

    Args:
        model: the part of the model that this rank owns.
        plan: tells which passes there are.
        replicas: number of ranks over which gradients are summed. Parameters with an ``axis`` have
            another number.
        limit: size, in elements, at which a bucket is full; ``None``: ``DEFAULT_BUCKET_SIZE``, or
            ``DEFAULT_PER_REPLICA`` for each replica if that is more. A parameter is not cut.
        number: approximate number of buckets, in place of ``limit``. (It is not exact, because no
            parameter is cut.)
        keeps_whole: tells which parameters shards must not cut. Such parameters share buckets only
            with each other.
        narrow: the ``id`` of parameters that are gathered in 8 bits. These have buckets of their
            own.
    """
    touched = touches(model, plan)
    together: dict[_Alike, list[OwnedParameter]] = defaultdict(list)
    for owned in model.owned_parameters():
        added, whole = summands(owned, model, plan), keeps_whole(owned)
        number_of = id(owned.parameter)
        alike = _Alike(touched[number_of], added, whole, owned.axis, number_of in narrow)
        together[alike].append(owned)
    if number is not None:
        limit = sum(p.numel() for p in model.parameters()) // number
    if limit is None:
        limit = max(DEFAULT_BUCKET_SIZE, DEFAULT_PER_REPLICA * replicas)
    return [
        bucket
        for alike, parameters in together.items()
        for fitting in ([parameters] if alike.whole else _by_rows(parameters))
        for bucket in _filled(fitting, limit)
    ]


def summands(owned: OwnedParameter, model: RankModel, plan: Plan) -> tuple[Summands, ...]:
    """Return which ranks of the replica have summands of a gradient, in the order of the sums.

    The result is the same for all parameters of a bucket.
    """
    holders = ranks_with_copies(plan, tied=model.config.vocabulary.tie_embeddings)
    twin = owned.name == WORD_EMBEDDINGS and len(holders) > 1
    found: list[Summands] = ["tensor"] if owned.is_partial else []
    return (*found, "ends") if twin else tuple(found)


def _by_rows(parameters: Iterable[OwnedParameter]) -> list[list[OwnedParameter]]:
    """Group parameters whose row lengths can share a bucket, longest rows first."""
    classes: list[list[OwnedParameter]] = []
    rows = {id(owned): row_length(tuple(owned.parameter.shape)) for owned in parameters}
    for owned in sorted(parameters, key=lambda owned: -rows[id(owned)]):
        fits = (
            known for known in classes if share_a_bucket([rows[id(one)] for one in (*known, owned)])
        )
        chosen = next(fits, None)
        if chosen is None:
            classes.append([owned])
        else:
            chosen.append(owned)
    return classes


def described(
    buckets: Sequence[Sequence[OwnedParameter]],
    model: RankModel,
    plan: Plan,
    replicas: int,
    narrow: Container[int] = (),
) -> list[Bucket]:
    """Return the descriptions of this rank's buckets that a program needs.

    The ``buckets`` may have been made for another plan than ``plan``, with the same stages;
    ``narrow`` as for ``make_buckets``.
    """
    touched, read = touches(model, plan), reads(model, plan)
    sizes = [_exchanged(bucket, replicas) for bucket in buckets]
    gathered = [
        size * gathered_size(bucket, narrow) for bucket, size in zip(buckets, sizes, strict=True)
    ]
    whole, all_gathered = sum(sizes) or 1.0, sum(gathered) or 1.0
    return [
        Bucket(
            _of_any(touched, bucket),
            size / whole,
            _of_any(read, bucket),
            bucket[0].sharers(replicas) > 1 or bool(summands(bucket[0], model, plan)),
            moved / all_gathered,
        )
        for bucket, size, moved in zip(buckets, sizes, gathered, strict=True)
    ]


def gathered_size(bucket: Sequence[OwnedParameter], narrow: Container[int]) -> float:
    """Return the size of a number when a bucket is gathered, 1 for 16 bits.

    ``narrow`` as for ``make_buckets``.
    """
    return 0.5 if id(bucket[0].parameter) in narrow else 1.0


def _exchanged(bucket: Sequence[OwnedParameter], replicas: int) -> float:
    """Return a bucket's weight by its traffic: its elements, or less if fewer ranks share it."""
    size, sharers = sum(owned.parameter.numel() for owned in bucket), bucket[0].sharers(replicas)
    if sharers == replicas:
        return size
    # A reduction over k ranks moves (k - 1) / k of the elements from each rank.
    return size * (1 - 1 / sharers) / (1 - 1 / max(2, replicas))


def _of_any(
    passes: dict[int, frozenset[Touch]], bucket: Iterable[OwnedParameter]
) -> frozenset[Touch]:
    return frozenset(touch for owned in bucket for touch in passes[id(owned.parameter)])


def touches(model: RankModel, plan: Plan) -> dict[int, frozenset[Touch]]:
    """Return the passes that add to the gradient of every parameter, by its ``id``."""
    products: PassKind = "W" if plan.split_backward else "B"
    sharded = plan.treatment.is_sharded
    found: dict[int, set[Touch]] = defaultdict(set)
    deferred = {id(weight) for part in deferring_parts(model) for weight in part.deferred}
    for module, chunk in parts_of_chunks(model):
        for parameter in module.parameters():
            kind: PassKind = products if id(parameter) in deferred else "B"
            found[id(parameter)].add((kind, chunk))
    for layer, reader in _embeddings(model):
        found[id(layer.weight)].add(("IB", 0) if sharded else ("B", _chunk(reader)))
    if model.output_layer is not None:
        by: Touch = ("T", 0) if sharded else (products, _chunk(model.placement.last_chunk))
        found[id(model.output_layer.weight)].add(by)
    return {parameter: frozenset(passes) for parameter, passes in found.items()}


def reads(model: RankModel, plan: Plan) -> dict[int, frozenset[Touch]]:
    """Return the passes that are the first to read every parameter, by its ``id``."""
    sharded = plan.treatment.is_sharded
    found: dict[int, set[Touch]] = defaultdict(set)
    for module, chunk in parts_of_chunks(model):
        for parameter in module.parameters():
            found[id(parameter)].add(("F", chunk))
    for layer, reader in _embeddings(model):
        found[id(layer.weight)].add(("IF", 0) if sharded else ("F", _chunk(reader)))
    if model.output_layer is not None:
        by: Touch = ("S", 0) if sharded else ("F", _chunk(model.placement.last_chunk))
        found[id(model.output_layer.weight)].add(by)
    return {parameter: frozenset(passes) for parameter, passes in found.items()}


def parts_of_chunks(model: RankModel) -> Iterator[tuple[nn.Module, int]]:
    """Yield the modules between the vocabulary layers, each with its chunk."""
    placement = model.placement
    for chunk, layers in enumerate(model.chunks):
        yield layers, chunk
    for end, module in (
        (placement.first_chunk, model.embedding_norm),
        (placement.first_chunk, model.positions),
        (placement.norm_chunk, model.final_norm),
        (placement.norm_chunk, model.mtp),
    ):
        if end is not None and module is not None:
            yield module, end


def _embeddings(model: RankModel) -> Iterator[tuple[InputLayer, int | None]]:
    """Yield each embedding layer with the chunk that reads it; ``None``: another rank's chunk."""
    if model.input_layer is not None:
        yield model.input_layer, model.placement.first_chunk
    if model.ahead_layer is not None:
        yield model.ahead_layer, model.placement.norm_chunk


def _chunk(chunk: int | None) -> int:
    assert chunk is not None, "a whole vocabulary layer is where its stage is"
    return chunk


def _filled(
    parameters: Sequence[OwnedParameter], limit: int
) -> Iterator[tuple[OwnedParameter, ...]]:
    """Yield buckets of parameters, last parameter first, as the backward goes."""
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
