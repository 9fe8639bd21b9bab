"""The parts of this rank's parameters that an optimizer updates."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from megatron.layers.main_grad import main_grad_of
from megatron.model.ownership import OwnedParameter
from megatron.parallel.box import Piece


@dataclass(frozen=True)
class ParameterPart:
    """Rows of a parameter that this rank updates: all rows, or the rows in its shard (ZeRO).

    Attributes:
        owned: the parameter.
        weight: the rows, in the dtype that the forward pass reads.
        gradient: the main gradient of the rows.
        pieces: the boxes of the whole model's tensor that the rows contain, with their places in
            ``weight``.
    """

    owned: OwnedParameter
    weight: Tensor
    gradient: Tensor
    pieces: tuple[Piece, ...]

    @classmethod
    def whole(cls, owned: OwnedParameter) -> "ParameterPart":
        """Return all rows of a parameter, which must have its main gradient."""
        return cls.rows(owned, 0, len(owned.parameter))

    @classmethod
    def rows(
        cls, owned: OwnedParameter, first: int, last: int, weight: Tensor | None = None
    ) -> "ParameterPart":
        """Return rows ``first`` to ``last`` - 1 of a parameter that has its main gradient.

        ``weight`` are these rows, if they are not in the parameter itself.
        """
        parameter = owned.parameter
        return cls(
            owned,
            parameter.detach()[first:last] if weight is None else weight,
            main_grad_of(parameter)[first:last],
            tuple(_pieces_in(owned.pieces, first, last)),
        )

    @property
    def name(self) -> str:
        """Name of the parameter in the whole model."""
        return self.owned.name

    @property
    def counts_in_norm(self) -> bool:
        """Whether this rank adds the gradient to the norm: only one of several copies counts."""
        return not self.owned.is_copy

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Shape of the whole model's tensor."""
        return self.owned.global_shape


def _pieces_in(pieces: tuple[Piece, ...], first: int, last: int) -> Iterator[Piece]:
    """Yield the pieces in rows ``first`` to ``last`` - 1 of a tensor, placed within these rows."""
    for piece in pieces:
        top, rows = piece.at[0], piece.box.shape[0]
        begin, end = max(first, top), min(last, top + rows)
        if begin < end:
            yield Piece(piece.box.rows(begin - top, end - top), (begin - first, *piece.at[1:]))
