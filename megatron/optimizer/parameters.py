"""The facts about a parameter that the optimizer needs besides its values."""

from dataclasses import dataclass

from torch import nn

from megatron.model.ownership import OwnedParameter


@dataclass(frozen=True)
class OptimizedParameter:
    """A parameter of this rank and how the optimizer treats it.

    Attributes:
        owned: the parameter, its name and its boxes.
        weight_decay: whether decay applies (``wants_weight_decay`` is Megatron's rule).
    """

    owned: OwnedParameter
    weight_decay: bool

    @classmethod
    def of(cls, owned: OwnedParameter) -> "OptimizedParameter":
        """Return a parameter that is treated as Megatron treats one of its name and shape."""
        return cls(owned, wants_weight_decay(owned.name, owned.parameter))

    @property
    def name(self) -> str:
        """Its name in the whole model, for messages and checkpoints."""
        return self.owned.name

    @property
    def parameter(self) -> nn.Parameter:
        """The tensor that the forward pass reads."""
        return self.owned.parameter

    @property
    def counts_in_norm(self) -> bool:
        """Whether its gradient enters the global norm from this rank: one of its copies does."""
        return not self.owned.is_copy


def wants_weight_decay(name: str, parameter: nn.Parameter) -> bool:
    """Megatron's rule: matrices decay, embeddings included; biases and vectors (norms) do not."""
    return parameter.dim() > 1 and not name.endswith(".bias")
