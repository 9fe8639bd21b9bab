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
        """Return a parameter, with weight decay by Megatron's rule for its name and shape."""
        return cls(owned, wants_weight_decay(owned.name, owned.parameter))

    @property
    def name(self) -> str:
        """The parameter's name in the whole model, for messages and checkpoints."""
        return self.owned.name

    @property
    def parameter(self) -> nn.Parameter:
        """The tensor that the forward pass reads."""
        return self.owned.parameter

    @property
    def counts_in_norm(self) -> bool:
        """Whether this rank adds the gradient to the norm: only one of several copies counts."""
        return not self.owned.is_copy


@dataclass(frozen=True)
class ParameterPart:
    """Rows of a parameter that this rank updates: all rows, or the rows in its shard (ZeRO).

    Attributes:
        entry: the parameter.
        weight: the rows, in the dtype that the forward pass reads.
        gradient: the main gradient of the rows.
        pieces: the boxes of the whole model's tensor that the rows contain, with their places in
            ``weight``.
    """

    entry: OptimizedParameter
    weight: Tensor
    gradient: Tensor
    pieces: tuple[Piece, ...]

    @classmethod
    def whole(cls, entry: OptimizedParameter) -> "ParameterPart":
        """Return all rows of a parameter, which must have its main gradient."""
        return cls.rows(entry, 0, len(entry.parameter))

    @classmethod
    def rows(
        cls, entry: OptimizedParameter, first: int, last: int, weight: Tensor | None = None
    ) -> "ParameterPart":
        """Return rows ``first`` to ``last`` - 1 of a parameter that has its main gradient.

        ``weight`` are these rows, if they are not in the parameter itself.
        """
        parameter = entry.parameter
        return cls(
            entry,
            parameter.detach()[first:last] if weight is None else weight,
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
        """Whether this rank adds the gradient to the global norm."""
        return self.entry.counts_in_norm

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Shape of the whole model's tensor."""
        return self.entry.owned.global_shape


def _pieces_in(pieces: tuple[Piece, ...], first: int, last: int) -> Iterator[Piece]:
    """Yield the pieces in rows ``first`` to ``last`` - 1 of a tensor, placed within these rows."""
    for piece in pieces:
        top, rows = piece.at[0], piece.box.shape[0]
        begin, end = max(first, top), min(last, top + rows)
        if begin < end:
            yield Piece(piece.box.rows(begin - top, end - top), (begin - first, *piece.at[1:]))


def wants_weight_decay(name: str, parameter: nn.Parameter) -> bool:
    """Return whether a parameter decays.

    By Megatron's rule matrices decay, embeddings included; biases and vectors (norms) do not.
    """
    return parameter.dim() > 1 and not name.endswith(".bias")
