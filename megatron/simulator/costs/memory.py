"""Bytes that every rank holds: parameters with their optimizer state, activations, logits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from megatron.schedules.plan import TREATMENTS
from megatron.simulator.costs.shape import ACTIVATION_BYTES, Shape
from megatron.simulator.peak_bytes import Sizes

FP16_PARAMETER: Final = 16
"""Bytes a parameter: weight and gradient in 16 bits (2 + 2), Adam's fp32 master weight, mean and
variance (12), as Megatron-LM keeps them with ``--fp16``."""

FP32_GRADIENT_PARAMETER: Final = 18
"""The same with the gradient accumulated in fp32, Megatron-LM's default with ``--bf16``."""


@dataclass(frozen=True)
class LogitBytes:
    """Bytes a logit, by how the output layer's kernels store it.

    Attributes:
        held: exponentials, from the forward (S) to the backward (T).
        working: more while a pass runs.
    """

    held: float
    working: float


UNFUSED_LOGITS: Final = LogitBytes(held=4, working=4)
"""Megatron-LM's kernels: exponentials in fp32; logits and their gradient in 16 bits come and go."""


def model_sizes(
    shape: Shape,
    stages: Sequence[tuple[int, int]],
    layers: Sequence[int],
    vocabulary: str,
    *,
    per_parameter: float = FP16_PARAMETER,
    logit: LogitBytes = UNFUSED_LOGITS,
    tied: bool = False,
) -> Sizes:
    """Return what a model weighs on every rank.

    What the output layer's passes need while they run counts as static, as if it were there
    whenever a rank is at its fullest.

    Args:
        shape: the model and one microbatch.
        stages: (rank, chunk) of every stage in the order of the data, as in ``Plan``.
        layers: transformer layers of every stage, in that order.
        vocabulary: a treatment of the vocabulary.
        per_parameter: bytes of a parameter with its gradient and optimizer state.
        logit: bytes of a logit.
        tied: input and output layer share a matrix; each holds a copy where they are on different
            ranks.
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
    if TREATMENTS[vocabulary].barriers is None:
        static[first] += embedding
        static[last] += logit.working * shape.logits
        static[last] += 0.0 if tied and first == last else embedding
        activation[last][last_chunk] += x + logit.held * shape.logits
        return Sizes(static, activation)
    shard = ((1 if tied else 2) * embedding + logit.working * shape.logits) / ranks
    return Sizes(
        [own + shard for own in static],
        activation,
        exponentials=x + logit.held * shape.logits / ranks,
        embedding=[x if rank == first else 0.0 for rank in range(ranks)],
    )
