"""What a rank holds only while a pass runs, beside what passes leave for one another, in bytes.

Ranks of this project on GPUs, in bf16 or fp16. Products add to the gradients of matrices where
these are, so no gradient of a matrix is counted.
"""

from collections.abc import Sequence

from megatron.schedules.passes import PassKind
from megatron.schedules.plan import Plan
from megatron.simulator.costs.activation_bytes import (
    depth_repeated_bytes,
    mlp_bytes,
    stage_repeated_bytes,
)
from megatron.simulator.costs.model_bytes import LogitBytes
from megatron.simulator.costs.optimizer_bytes import FP32_BYTES
from megatron.simulator.costs.shape import ACTIVATION_BYTES, Shape

PerChunk = list[list[float]]
"""Bytes of every rank and chunk."""

Working = dict[PassKind, list[float] | PerChunk]
"""Bytes of every rank, and of every chunk where a pass belongs to one."""


def working_bytes(shape: Shape, plan: Plan, layers: Sequence[int], logit: LogitBytes) -> Working:
    """Return what every rank works with, by the kind of pass.

    A collective that follows a pass at once counts as a part of it.

    Args:
        shape: the model and one microbatch.
        plan: what runs.
        layers: transformer layers of every stage, in the order of the data.
        logit: bytes of the output layer.
    """
    stages = range(len(plan.stages))
    kinds: dict[PassKind, PerChunk] = {
        "F": _by_chunk(plan, [_in_forward(shape, plan, layers, stage) for stage in stages]),
        "R": _by_chunk(plan, [_in_layer(shape) for _ in stages]),
        "B": _by_chunk(plan, [_in_backward(shape, plan, layers, stage) for stage in stages]),
        "W": _by_chunk(plan, [_in_weight_gradients(shape) for _ in stages]),
    }
    in_s, in_t = _in_s(shape, plan, logit), _in_t(shape, plan, logit)
    last, chunk = plan.stages[-1]
    if not plan.treatment.is_sharded:
        ends: tuple[PassKind, PassKind] = ("F", "W" if plan.split_backward else "B")
        for kind in ends:
            kinds[kind][last][chunk] = max(kinds[kind][last][chunk], in_s, in_t)
        return dict(kinds)
    # What C1 makes of A is, on the last rank, the gradient that its B reads.
    made = ACTIVATION_BYTES * shape.output_elements * (plan.treatment.gradient_pass == "S")
    ranks = range(plan.ranks)
    return {
        **kinds,
        "S": [in_s + (made if rank != last else 0.0) for rank in ranks],
        "T": [in_t for _ in ranks],
        "IB": [float(FP32_BYTES * shape.elements) for _ in ranks],
    }


def _by_chunk(plan: Plan, by_stage: Sequence[float]) -> PerChunk:
    found = [[0.0] * plan.chunks for _ in range(plan.ranks)]
    for (rank, chunk), size in zip(plan.stages, by_stage, strict=True):
        found[rank][chunk] = size
    return found


def _in_layer(shape: Shape) -> float:
    """Return what a layer's forward has at its end: its result, and two summands of that."""
    shared = shape.tensor.ranks > 1
    return ACTIVATION_BYTES * (3 * shape.own_elements + shared * shape.elements)


def _in_forward(shape: Shape, plan: Plan, layers: Sequence[int], stage: int) -> float:
    """Return what F works with; where it computes all layers for nobody, it is a layer's MLP.

    Where only the first layers are computed again, the last one keeps more than that.
    """
    nobody_needs_it = 0 < layers[stage] == shape.recomputed.layers(layers[stage])
    inner = mlp_bytes(shape) if nobody_needs_it else 0.0
    if stage < len(plan.stages) - 1:
        return inner + _in_layer(shape)
    return inner + ACTIVATION_BYTES * (shape.output_elements + shape.own_elements)


def _in_backward(shape: Shape, plan: Plan, layers: Sequence[int], stage: int) -> float:
    """Return what B works with.

    Where B is fullest, there are the gradient that it begins with, and within the MLP that of its
    first product; where W is a pass of its own, that of its last product's input too. In 8 bits
    there are copies of the gradient by rows and, for W, by columns, in the place of the activation
    function's input; if that was computed again, see ``_in_narrow_mlp``. Or, where the MLP is
    narrow, gradients as wide as the residual stream; ranks that share a layer hold their part of a
    sum in addition, and with sequence parallelism the input that they have gathered. Within
    attention there are, if ranks share a sequence, the gradients of the keys and values of all, and
    a copy by ranks. What is computed again is there too; where W is a pass of its own, it counts as
    what B leaves for W, and where R is one, as what R leaves for B.
    """
    own, again = shape.of_layers(sum(layers[:stage]), layers[stage]), 0.0
    if not (plan.split_backward or plan.recomputes):
        again = stage_repeated_bytes(own, layers[stage])
        if stage == len(plan.stages) - 1:
            again = max(again, depth_repeated_bytes(shape.of_depths))
    inner = shape.inner_width + plan.split_backward * shape.rank_ffn_width
    outside = 1 + (shape.tensor.ranks > 1) + shape.tensor.sequence_parallel
    keeps = shape.recomputed.mlp or shape.recomputed.layers(layers[stage])
    inner_bytes = float(ACTIVATION_BYTES * inner * shape.tokens)
    if own.narrow_share and keeps:
        inner_bytes = _in_narrow_mlp(shape, split=plan.split_backward)
    within = max(inner_bytes, ACTIVATION_BYTES * outside * shape.elements)
    return again + shape.stream_bytes + max(within, 2.0 * shape.gathered_bytes)


def _in_narrow_mlp(shape: Shape, *, split: bool) -> float:
    """Return what B works with in an MLP that multiplies in 8 bits and was computed again.

    Where W is a pass of its own: both gradients of the activation function, and 8 bits of the one
    that its first product reads. Where B forms all gradients: when computing again ends, the output
    of that function beside its 8 bits, and the norm that the MLP reads; or, in the backward of that
    function, both gradients, when what was kept of its output is gone.
    """
    inner, width, narrow = shape.inner_width, shape.rank_ffn_width, shape.narrow_factors
    both = ACTIVATION_BYTES * (inner + width)
    if split:
        return float((both + (1 + narrow) * inner) * shape.tokens)
    kept = 1 if narrow else ACTIVATION_BYTES
    copies = 1 + ACTIVATION_BYTES * narrow
    last = copies * width * shape.tokens + ACTIVATION_BYTES * shape.own_elements
    return float(max(last, (both - kept * width) * shape.tokens))


def _in_weight_gradients(shape: Shape) -> float:
    """Return what W works with: what it gathers of a product's factors."""
    gathers = shape.tensor.sequence_parallel
    return float(2 * ACTIVATION_BYTES * shape.elements * gathers)


def _in_s(shape: Shape, plan: Plan, logit: LogitBytes) -> float:
    """Return what S, and C1 behind it, work with, without the gradient that C1 makes."""
    scaled = ACTIVATION_BYTES * shape.output_elements
    early = max(0.0, logit.early_gradient - ACTIVATION_BYTES) * shape.output_elements
    in_first_products = max(0.0, logit.workspace - scaled)
    return in_first_products + (early if plan.treatment.gradient_pass == "S" else 0.0)


def _in_t(shape: Shape, plan: Plan, logit: LogitBytes) -> float:
    """Return what T works with: X, scaled, and the sum in fp32 if it forms the input gradient."""
    sums = FP32_BYTES * shape.output_elements
    return logit.workspace + (sums if plan.treatment.gradient_pass == "T" else 0.0)
