"""The facts about a parameter that the optimizer needs besides its values."""

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class OptimizedParameter:
    """A parameter of this rank and how the optimizer treats it.

    Attributes:
        name: its name in the whole model, for messages and checkpoints.
        parameter: the tensor that the forward pass reads.
        weight_decay: whether decay applies (``wants_weight_decay`` is Megatron's rule).
        counts_in_norm: whether its gradient enters the global norm from this rank. If several
            ranks hold a copy of the parameter, exactly one copy counts.
    """

    name: str
    parameter: nn.Parameter
    weight_decay: bool
    counts_in_norm: bool = True


def wants_weight_decay(name: str, parameter: nn.Parameter) -> bool:
    """Megatron's rule: matrices decay, embeddings included; biases and vectors (norms) do not."""
    return parameter.dim() > 1 and not name.endswith(".bias")
