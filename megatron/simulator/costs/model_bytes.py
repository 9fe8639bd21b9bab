"""Bytes that every rank holds: parameters with their optimizer state, activations, logits.

The tensor ranks of a stage hold alike; a *rank* here is any of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from megatron.schedules.treatments import Treatment
from megatron.simulator.costs.activation_bytes import (
    depth_activation_bytes,
    depth_factor_bytes,
    layer_factor_bytes,
    stage_activation_bytes,
    stage_recomputed_bytes,
)
from megatron.simulator.costs.peak_bytes import Sizes
from megatron.simulator.costs.recomputed import NOTHING
from megatron.simulator.costs.shape import ACTIVATION_BYTES, Shape

FP16_PARAMETER: Final = 16
"""Bytes a parameter: weight and gradient in 16 bits (2 + 2), Adam's fp32 master weight, mean and
variance (12), as Megatron-LM keeps them with ``--fp16``."""

FP32_GRADIENT_PARAMETER: Final = 18
"""The same with the gradient accumulated in fp32, Megatron-LM's default with ``--bf16``."""


@dataclass(frozen=True)
class LogitBytes:
    """Bytes of the output layer, by how its kernels work.

    Attributes:
        held: bytes per logit from the forward (S) to the backward (T): the exponentials.
        working: additional bytes per logit while a pass runs.
        workspace: additional bytes while a pass runs, independent of the number of logits.
        early_gradient: bytes per element of X of the input gradient that S leaves for the barrier,
            if S computes this gradient.
    """

    held: float
    working: float
    workspace: float = 0.0
    early_gradient: float = 0.0


UNFUSED_LOGITS: Final = LogitBytes(held=4, working=4)
"""Megatron-LM's kernels: exponentials in fp32; logits and their gradient in 16 bits come and go."""


def parameters(
    shape: Shape,
    stages: Sequence[tuple[int, int]],
    layers: Sequence[int],
    treatment: Treatment,
    *,
    tied: bool = False,
) -> list[float]:
    """Return the parameters of a rank of every stage, with its shard of the vocabulary.

    Args: as those of ``model_sizes``.
    """
    ranks = 1 + max(rank for rank, _ in stages)
    counts = [0.0] * ranks
    for (rank, _), count in zip(stages, layers, strict=True):
        counts[rank] += count * shape.layer_parameters
    whole = shape.vocabulary_parameters / shape.tensor.ranks
    counts[stages[-1][0]] += shape.depths * shape.depth_parameters
    if treatment.is_sharded:
        return [own + (1 if tied else 2) * whole / ranks for own in counts]
    first, last = stages[0][0], stages[-1][0]
    counts[first] += whole
    counts[last] += 0 if tied and first == last else whole
    counts[last] += whole if shape.depths and not tied and first != last else 0
    return counts


def model_sizes(
    shape: Shape,
    stages: Sequence[tuple[int, int]],
    layers: Sequence[int],
    treatment: Treatment,
    *,
    per_parameter: float = FP16_PARAMETER,
    logit: LogitBytes = UNFUSED_LOGITS,
    tied: bool = False,
    frees_in_backward: bool = False,
) -> Sizes:
    """Return the sizes of all that every rank holds.

    The working memory of the output layer's passes counts as static, as if it were needed at the
    moment of the peak.

    Args:
        shape: the model and one microbatch.
        stages: (rank, chunk) of every stage in the order of the data, as in ``Plan``.
        layers: transformer layers of every stage, in that order.
        treatment: how the vocabulary layers are run.
        per_parameter: bytes of a parameter with its gradient and optimizer state.
        logit: bytes of the output layer.
        tied: input and output layer share a matrix; if they are on different ranks, each rank
            holds a copy.
        frees_in_backward: a B that leaves weight gradients to W leaves it only their factors, also
            where nothing is computed again.
    """
    ranks = 1 + max(rank for rank, _ in stages)
    first, (last, last_chunk) = stages[0][0], stages[-1]
    x = float(ACTIVATION_BYTES * shape.output_elements)
    counts = parameters(shape, stages, layers, treatment, tied=tied)
    static = [per_parameter * count for count in counts]
    activation = [[0.0] * (len(stages) // ranks) for _ in range(ranks)]
    factors, repeated = [list(own) for own in activation], [list(own) for own in activation]
    firsts = accumulate(layers, initial=0)
    for (rank, chunk), layer_count, first_layer in zip(stages, layers, firsts, strict=False):
        own = shape.of_layers(first_layer, layer_count)
        activation[rank][chunk] += stage_activation_bytes(own, layer_count)
        factors[rank][chunk] += layer_count * layer_factor_bytes(own)
        repeated[rank][chunk] += stage_recomputed_bytes(own, layer_count)
        static[rank] += layer_count * own.narrow_weight_bytes
    own_x = ACTIVATION_BYTES * shape.own_elements
    activation[last][last_chunk] += shape.stream_bytes  # the final norm keeps its input
    if shape.depths:
        depth = shape.of_depths
        activation[last][last_chunk] += own_x + shape.depths * depth_activation_bytes(depth)
        factors[last][last_chunk] += shape.depths * depth_factor_bytes(depth)
        joining = 2 * depth.narrow_share * shape.joining_parameters
        static[last] += shape.depths * (depth.narrow_weight_bytes + joining)
    apart = frees_in_backward or shape.recomputed != NOTHING or shape.narrow is not None
    logits = shape.logits / shape.tensor.ranks / (ranks if treatment.is_sharded else 1)
    exponentials = x + logit.held * logits
    at_work = logit.workspace + logit.working * logits
    at_work += treatment.gradients_held * logit.early_gradient * shape.output_elements
    if not treatment.is_sharded:
        static[last] += at_work
        activation[last][last_chunk] += exponentials
        factors[last][last_chunk] += exponentials
        return Sizes(static, activation, factors=factors if apart else None, repeated=repeated)
    # The first rank's sum takes the place of its part, but not of what the last stage reads ahead.
    ahead = float(ACTIVATION_BYTES * shape.elements * (shape.depths > 0))
    partial = ahead + ACTIVATION_BYTES * shape.elements
    return Sizes(
        [own + at_work for own in static],
        activation,
        exponentials=exponentials,
        embedding=[own_x if rank == first else 0.0 for rank in range(ranks)],
        partial=[ahead if rank == first else partial for rank in range(ranks)],
        ahead=[own_x if shape.depths and rank == last else 0.0 for rank in range(ranks)],
        factors=factors if apart else None,
        repeated=repeated,
    )
