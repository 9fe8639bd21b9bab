"""Bytes that a training run of this project holds on GPUs, in bf16 or fp16."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from megatron.schedules.plan import Plan
from megatron.schedules.treatments import Treatment
from megatron.simulator.costs.model_bytes import LogitBytes, model_sizes, parameters
from megatron.simulator.costs.optimizer_bytes import ADAM, FP32_BYTES, OptimizerBytes
from megatron.simulator.costs.peak_bytes import Size, Sizes
from megatron.simulator.costs.replicas import ALONE, Replicas
from megatron.simulator.costs.shape import ACTIVATION_BYTES, Shape


def own_logits(shape: Shape, shards: int, slice_tokens: int, span: int) -> LogitBytes:
    """Return the bytes of this project's output layer on GPUs: bf16 exponentials, the rest fp32.

    Args:
        shape: the model and one microbatch.
        shards: ranks that the vocabulary is split over.
        slice_tokens: tokens whose logits are there at a time if they are not kept.
        span: vocabulary entries of which a token has one partial maximum and one partial sum.
    """
    rows = -(-shape.vocab_size // shards)
    again = shape.vocab_recompute
    partial = FP32_BYTES * -(-rows // span) * (slice_tokens if again else shape.outputs)
    scaled = ACTIVATION_BYTES * shape.output_elements  # X in T, or the gradient that C1 makes of A
    return LogitBytes(
        held=0 if again else ACTIVATION_BYTES,
        working=0.0,
        workspace=(ACTIVATION_BYTES * rows * slice_tokens if again else 0) + max(partial, scaled),
        early_gradient=FP32_BYTES + ACTIVATION_BYTES,  # A, and what C1 made of the one before
    )


def training_sizes(
    shape: Shape,
    plan: Plan,
    layers: Sequence[int],
    treatment: Treatment,
    logit: LogitBytes,
    *,
    tied: bool,
    positions: int,
    changes_words: bool = False,
    post_validation: bool,
    replicas: Replicas = ALONE,
    padding: float = 0.0,
    optimizer: OptimizerBytes = ADAM,
) -> Sizes:
    """Return what a run weighs on every rank.

    To the paper's formulas this adds what they leave out, a few percent: what B works with, and
    positions.

    Args:
        shape: the model and one microbatch.
        plan: what runs.
        layers: transformer layers of every stage, in the order of the data.
        treatment: what becomes of the vocabulary layers.
        logit: bytes of the output layer.
        tied: input and output layer share a matrix.
        positions: that have an embedding of their own, which is learned; 0 without.
        changes_words: word embeddings are scaled or normalised before the first layer.
        post_validation: steps are validated afterwards, so that all ranks but the last keep a copy
            of the optimizer's state.
        replicas: of the pipeline; a sharded optimizer spreads its state over them.
        padding: of the buckets, as a share of the parameters.
        optimizer: what it keeps.
    """
    # Padding lies in what is cut into shards: gradients, and with a sharded optimizer all else.
    shared = 1 + padding if replicas.sharded else 1.0
    per_parameter = ACTIVATION_BYTES * shared + optimizer.gradient * (1 + padding)
    sizes = model_sizes(
        shape,
        plan.stages,
        layers,
        treatment,
        per_parameter=per_parameter,
        logit=logit,
        tied=tied,
    )
    first, first_chunk = plan.stages[0]
    in_positions = positions * shape.hidden_size
    counts = parameters(shape, plan.stages, layers, treatment, tied=tied)
    counts[first] += in_positions
    copies = _keepers_of_a_copy(plan, post_validation)
    states = [
        (shared + (rank in copies)) * optimizer.of_rank(count, own) / replicas.optimizer_parts
        for rank, (count, own) in enumerate(
            zip(counts, _in_matrices(shape, plan, layers), strict=True)
        )
    ]
    at_work = _layer_at_work(shape, plan, layers, treatment, logit)
    static = list(map(sum, zip(of_ranks(sizes.static), at_work, states, strict=True)))
    static[first] += per_parameter * in_positions
    assert not isinstance(sizes.activation, (int, float))
    activation = [list(of_ranks(own)) for own in sizes.activation]
    if positions or changes_words or shape.wide_stream:
        # The words' embeddings, which wait for their gradient beside what the layers read.
        activation[first][first_chunk] += ACTIVATION_BYTES * shape.own_elements
    return replace(sizes, static=static, activation=activation)


def _in_matrices(shape: Shape, plan: Plan, layers: Sequence[int]) -> list[float]:
    """Return the parameters in matrices of layers on every rank."""
    counts = [0.0] * plan.ranks
    for (rank, _), count in zip(plan.stages, layers, strict=True):
        counts[rank] += count * shape.matrix_parameters
    per_depth = shape.matrix_parameters + shape.joining_parameters
    counts[plan.stages[-1][0]] += shape.depths * per_depth
    return counts


def _layer_at_work(
    shape: Shape, plan: Plan, layers: Sequence[int], treatment: Treatment, logit: LogitBytes
) -> list[float]:
    """Return what B works with on every rank beyond the output layer's workspace.

    Where B is fullest, there is within the MLP a gradient of the inner activation, and besides that
    of the layer's output and the sum that it is part of; or, where W is a pass of its own, the
    gradients on both sides of the activation. Gradients of matrices are added to their sums within
    products.
    Ranks that share a layer hold their part of a sum in addition, and with sequence parallelism the
    input that they have gathered. Within attention there are, if ranks share a sequence, the
    gradients of the keys and values of all, and a copy by ranks. The output layer's workspace is
    not needed at the same time. What is computed again is there too; where W is a pass of its own,
    it counts as what B leaves for W, and where R is one, as what R leaves for B.
    """
    again = [0.0] * plan.ranks
    for (rank, _), count, first in zip(
        plan.stages, layers, accumulate(layers, initial=0), strict=False
    ):
        if not (plan.split_backward or plan.recomputes):
            own = shape.of_layers(first, count)
            again[rank] = max(again[rank], own.stage_repeated_bytes(count))
    beside = shape.inner_width * shape.tokens if plan.split_backward else 2 * shape.elements
    at_work = float(ACTIVATION_BYTES * (shape.inner_width * shape.tokens + beside))
    tensor = shape.tensor
    at_work += ACTIVATION_BYTES * shape.elements * ((tensor.ranks > 1) + tensor.sequence_parallel)
    at_work = max(at_work, 2.0 * shape.gathered_bytes)
    holders = range(plan.ranks) if treatment.is_sharded else (plan.stages[-1][0],)
    return [
        max(0.0, again[rank] + at_work - (logit.workspace if rank in holders else 0.0))
        for rank in range(plan.ranks)
    ]


def optimizer_traffic(
    shape: Shape,
    plan: Plan,
    layers: Sequence[int],
    treatment: Treatment,
    *,
    tied: bool,
    post_validation: bool,
    replicas: Replicas = ALONE,
    optimizer: OptimizerBytes = ADAM,
) -> list[float]:
    """Return the bytes that the optimizer's step moves on every rank.

    Args: as those of ``training_sizes``.
    """
    counts = parameters(shape, plan.stages, layers, treatment, tied=tied)
    matrices, parts = _in_matrices(shape, plan, layers), replicas.optimizer_parts
    moved = [
        optimizer.moved(count, own) / parts for count, own in zip(counts, matrices, strict=True)
    ]
    for rank in _keepers_of_a_copy(plan, post_validation):  # a copy is read and written
        moved[rank] += 2 * optimizer.of_rank(counts[rank], matrices[rank]) / parts
    return moved


def _keepers_of_a_copy(plan: Plan, post_validation: bool) -> range:
    """Return the ranks that may have to undo a step: the last one knows the norm of the model."""
    return range(plan.ranks - 1) if post_validation else range(0)


def of_ranks(size: Size) -> Sequence[float]:
    """Return a size as ``model_sizes`` gives it: one for each rank."""
    assert not isinstance(size, (int, float))
    return size
