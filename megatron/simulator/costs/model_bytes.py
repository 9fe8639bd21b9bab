"""Bytes that every rank holds: parameters with their optimizer state, activations, logits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from megatron.schedules.treatments import Treatment
from megatron.simulator.costs.peak_bytes import Sizes
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


def model_sizes(
    shape: Shape,
    stages: Sequence[tuple[int, int]],
    layers: Sequence[int],
    treatment: Treatment,
    *,
    per_parameter: float = FP16_PARAMETER,
    logit: LogitBytes = UNFUSED_LOGITS,
    tied: bool = False,
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
    """
    ranks = 1 + max(rank for rank, _ in stages)
    first, (last, last_chunk) = stages[0][0], stages[-1]
    x = float(ACTIVATION_BYTES * shape.elements)
    static = [0.0] * ranks
    activation = [[0.0] * (len(stages) // ranks) for _ in range(ranks)]
    for (rank, chunk), count in zip(stages, layers, strict=True):
        static[rank] += per_parameter * count * shape.layer_parameters
        activation[rank][chunk] += count * shape.layer_activation_bytes
    activation[last][last_chunk] += x  # the final norm keeps its input
    embedding = per_parameter * shape.vocabulary_parameters
    shards = ranks if treatment.is_sharded else 1
    exponentials = x + logit.held * shape.logits / shards
    at_work = logit.workspace + logit.working * shape.logits / shards
    at_work += treatment.gradients_held * logit.early_gradient * shape.elements
    if not treatment.is_sharded:
        static[first] += embedding
        static[last] += at_work
        static[last] += 0.0 if tied and first == last else embedding
        activation[last][last_chunk] += exponentials
        return Sizes(static, activation)
    shard = (1 if tied else 2) * embedding / ranks + at_work
    return Sizes(
        [own + shard for own in static],
        activation,
        exponentials=exponentials,
        embedding=[x if rank == first else 0.0 for rank in range(ranks)],
    )
