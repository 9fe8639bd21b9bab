"""The facts about a parameter that the optimizer needs besides its values."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from megatron.layers.main_grad import main_grad_of
from megatron.model.ownership import OwnedParameter
from megatron.parallel.box import Piece


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


@dataclass(frozen=True)
class ParameterPart:
    """Rows of a parameter that this rank updates: all of them, or those of its shard (ZeRO).

    Attributes:
        entry: the parameter.
        weight: the rows, as the forward pass reads them.
        gradient: the main gradient of the rows.
        pieces: the boxes of the whole model's tensor that are in the rows, placed in ``weight``.
    """

    entry: OptimizedParameter
    weight: Tensor
    gradient: Tensor
    pieces: tuple[Piece, ...]

    @classmethod
    def whole(cls, entry: OptimizedParameter) -> "ParameterPart":
        """Return all of a parameter, which has its main gradient."""
        return cls.rows(entry, 0, len(entry.parameter))

    @classmethod
    def rows(cls, entry: OptimizedParameter, first: int, last: int) -> "ParameterPart":
        """Return the rows ``first`` to ``last`` - 1 of a parameter, which has its main gradient."""
        parameter = entry.parameter
        return cls(
            entry,
            parameter.detach()[first:last],
            main_grad_of(parameter)[first:last],
            tuple(_pieces_in(entry.owned.pieces, first, last)),
        )

    @property
    def name(self) -> str:
        """Name of the parameter in the whole model."""
        return self.entry.name

    @property
    def weight_decay(self) -> bool:
        """Whether decay applies."""
        return self.entry.weight_decay

    @property
    def counts_in_norm(self) -> bool:
        """Whether its gradient enters the global norm from this rank."""
        return self.entry.counts_in_norm

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Shape of the whole model's tensor."""
        return self.entry.owned.global_shape


def _pieces_in(pieces: tuple[Piece, ...], first: int, last: int) -> Iterator[Piece]:
    """Yield what is in the rows ``first`` to ``last`` - 1 of a tensor, placed in those rows."""
    for piece in pieces:
        top, rows = piece.at[0], piece.box.shape[0]
        begin, end = max(first, top), min(last, top + rows)
        if begin < end:
            yield Piece(piece.box.rows(begin - top, end - top), (begin - first, *piece.at[1:]))


def wants_weight_decay(name: str, parameter: nn.Parameter) -> bool:
    """Megatron's rule: matrices decay, embeddings included; biases and vectors (norms) do not."""
    return parameter.dim() > 1 and not name.endswith(".bias")
