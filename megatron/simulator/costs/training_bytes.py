"""Bytes that a training run of this project holds on GPUs, in bf16 with fp32 gradients."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from megatron.schedules.plan import Plan
from megatron.schedules.treatments import Treatment
from megatron.simulator.costs.model_bytes import (
    FP32_GRADIENT_PARAMETER,
    LogitBytes,
    model_sizes,
)
from megatron.simulator.costs.peak_bytes import Size, Sizes
from megatron.simulator.costs.shape import ACTIVATION_BYTES, Shape

FP32_BYTES: Final = 4

OPTIMIZER_BYTES: Final = 30
"""Bytes that AdamW moves per parameter: it reads gradient, master weight and both moments, and
writes the last three and the bf16 parameter."""


def own_logits(shape: Shape, shards: int, tile_rows: int, exponentials_at_once: int) -> LogitBytes:
    """Return the bytes of this project's output layer on GPUs: bf16 exponentials, the rest fp32.

    Args:
        shape: the model and one microbatch.
        shards: ranks that the vocabulary is split over.
        tile_rows: vocabulary entries of a tile, the unit in which the output layer works.
        exponentials_at_once: number of a tile's exponentials that are in fp32 at the same time.
    """
    rows = min(tile_rows, -(-shape.vocab_size // shards))
    exponentials = FP32_BYTES * min(rows * shape.tokens, exponentials_at_once)
    gradient = ACTIVATION_BYTES * rows * shape.hidden_size  # the product that T adds
    # The targets' rows in bf16 and in fp32, and their product with X.
    targets = (ACTIVATION_BYTES + 2 * FP32_BYTES) * shape.elements
    return LogitBytes(
        held=ACTIVATION_BYTES,
        working=0.0,
        workspace=max(exponentials, gradient, targets),
        early_gradient=2 * FP32_BYTES,  # A and D
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
) -> Sizes:
    """Return what a run weighs on every rank.

    To the paper's formulas this adds what they leave out, a few percent: what B works with, and
    positions. Where B is fullest, there are within the MLP a gradient of the inner activation and
    the gradient of a matrix; or, where W is a pass of its own, the gradients on both sides of the
    activation. The output layer's workspace is not needed at the same time.

    Args:
        shape: the model and one microbatch.
        plan: what runs.
        layers: transformer layers of every stage, in the order of the data.
        treatment: what becomes of the vocabulary layers.
        logit: bytes of the output layer.
        tied: input and output layer share a matrix.
        positions: that have an embedding of their own, which is learned; 0 without.
    """
    sizes = _paper_sizes(shape, plan, layers, treatment, logit, tied=tied)
    beside = shape.tokens if plan.split_backward else shape.hidden_size
    at_work = ACTIVATION_BYTES * shape.inner_width * (shape.tokens + beside)
    (first, first_chunk), (last, _) = plan.stages[0], plan.stages[-1]
    holders = range(plan.ranks) if treatment.is_sharded else (last,)
    static = [
        held + max(0.0, at_work - (logit.workspace if rank in holders else 0.0))
        for rank, held in enumerate(of_ranks(sizes.static))
    ]
    assert not isinstance(sizes.activation, (int, float))
    activation = [list(of_ranks(own)) for own in sizes.activation]
    if positions:
        static[first] += FP32_GRADIENT_PARAMETER * positions * shape.hidden_size
        # The words' embeddings, which wait for their gradient beside the sum of the two.
        activation[first][first_chunk] += ACTIVATION_BYTES * shape.elements
    return replace(sizes, static=static, activation=activation)


def optimizer_traffic(
    shape: Shape, plan: Plan, layers: Sequence[int], treatment: Treatment, *, tied: bool
) -> float:
    """Return the bytes that the optimizer's step moves on the rank with the most parameters.

    Args: as those of ``training_sizes``.
    """
    sizes = _paper_sizes(shape, plan, layers, treatment, LogitBytes(0, 0), tied=tied)
    return OPTIMIZER_BYTES * max(of_ranks(sizes.static)) / FP32_GRADIENT_PARAMETER


def of_ranks(size: Size) -> Sequence[float]:
    """Return a size as ``model_sizes`` gives it: one for each rank."""
    assert not isinstance(size, (int, float))
    return size


def _paper_sizes(
    shape: Shape,
    plan: Plan,
    layers: Sequence[int],
    treatment: Treatment,
    logit: LogitBytes,
    *,
    tied: bool,
) -> Sizes:
    per_parameter = FP32_GRADIENT_PARAMETER
    return model_sizes(
        shape, plan.stages, layers, treatment, per_parameter=per_parameter, logit=logit, tied=tied
    )
