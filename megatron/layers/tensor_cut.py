"""How a layer declares that ranks share its parameters: tensor-parallel ranks, or ranks of experts.

A parameter is *cut*, or every rank holds all of it (*whole*). A whole parameter gets a gradient on
every rank. If the ranks apply the parameter to different tokens or heads, these gradients are
summands of the true gradient. A layer declares which parameters are cut, and which are applied only
to the rank's own heads. Every other parameter is whole, and is applied to the tokens that a rank
has outside of attention and MLP.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final, Protocol, TypeAlias, runtime_checkable

from torch import nn

from megatron.parallel.box import Piece, Shape, shard, whole
from megatron.parallel.experts import ExpertParallel
from megatron.parallel.groups import ConnectedAxis
from megatron.parallel.tensor import TensorParallel


@dataclass(frozen=True)
class Cut:
    """A parameter that is cut into equal parts, one for each tensor-parallel rank.

    Attributes:
        dimension: the dimension that is cut.
        fused: number of equal tensors that lie one after the other in ``dimension``; each is cut
            separately. It is 2 for SwiGLU's gate and up projection.
    """

    dimension: int
    fused: int = 1

    def whole_shape(self, own: Shape, tensor: TensorParallel) -> Shape:
        """Return the shape of the whole tensor, given the shape of a rank's part."""
        cut = own[self.dimension] * tensor.size
        return (*own[: self.dimension], cut, *own[self.dimension + 1 :])

    def pieces(self, own: Shape, tensor: TensorParallel) -> tuple[Piece, ...]:
        """Return the boxes of this rank, given the shape of this rank's part."""
        shape = self.whole_shape(own, tensor)
        return shard(shape, self.dimension, tensor.rank, tensor.size, self.fused)

    def is_copy(self, tensor: TensorParallel) -> bool:
        """Return whether rank 0 of the tensor axis holds the same boxes: always false."""
        return False

    def is_partial(self, tensor: TensorParallel) -> bool:
        """Return whether other ranks hold summands of the same gradient: always false."""
        return False

    axis: ClassVar[None] = None
    """The ranks over which the gradient is summed; ``None``: as for most parameters."""

    matrices: ClassVar[int] = 1
    """Number of equal matrices that lie one below the other in the parameter."""


@dataclass(frozen=True)
class Whole:
    """A parameter that every tensor-parallel rank holds whole.

    Attributes:
        for_own_heads: whether each rank applies the parameter to its own heads; otherwise to the
            tokens that it has outside of attention and MLP.
    """

    for_own_heads: bool = False

    def whole_shape(self, own: Shape, tensor: TensorParallel) -> Shape:
        """As in ``Cut``."""
        return own

    def pieces(self, own: Shape, tensor: TensorParallel) -> tuple[Piece, ...]:
        """As in ``Cut``."""
        return whole(own)

    def is_copy(self, tensor: TensorParallel) -> bool:
        """As in ``Cut``: true on all ranks except the first."""
        return tensor.rank > 0

    def is_partial(self, tensor: TensorParallel) -> bool:
        """As in ``Cut``: true if the ranks apply the parameter to different heads or tokens."""
        return (tensor.size if self.for_own_heads else tensor.sequence_parts) > 1

    axis: ClassVar[None] = None
    """As in ``Cut``."""

    matrices: ClassVar[int] = 1
    """As in ``Cut``."""


@dataclass(frozen=True)
class OfExperts:
    """The matrices of all experts of a layer, one below the other in one matrix; or their biases.

    Attributes:
        ranks: which ranks have which experts, and which parts of them.
        experts: number of experts of the layer, on all ranks.
        dimension: the dimension in which the ranks that share an expert cut its matrix.
        fused: number of equal matrices, one below the other, that an expert's matrix consists of;
            each is cut separately.
    """

    ranks: ExpertParallel
    experts: int
    dimension: int
    fused: int = 1

    def whole_shape(self, own: Shape, tensor: TensorParallel) -> Shape:
        """As in ``Cut``."""
        shape = [own[0] * self.ranks.size, *own[1:]]
        shape[self.dimension] *= self.ranks.tensor_size
        return tuple(shape)

    def pieces(self, own: Shape, tensor: TensorParallel) -> tuple[Piece, ...]:
        """As in ``Cut``: this rank's part of the rows of every expert that this rank has."""
        ranks, (rows, *columns) = self.ranks, self.whole_shape(own, tensor)
        of_experts = (rows // ranks.size, *columns)
        parts = 1
        if self.dimension == 0 and ranks.tensor_size > 1:
            parts = self.fused * self.experts // ranks.size
        cut = shard(of_experts, self.dimension, ranks.tensor_rank, ranks.tensor_size, parts)
        first = (ranks.rank * of_experts[0], *(0 for _ in columns))
        return tuple(Piece(piece.box.moved(first), piece.at) for piece in cut)

    def is_copy(self, tensor: TensorParallel) -> bool:
        """As in ``Cut``: false, because ranks with the same boxes are on ``axis``."""
        return False

    def is_partial(self, tensor: TensorParallel) -> bool:
        """As in ``Cut``: false, because ranks with the same boxes are on ``axis``."""
        return False

    @property
    def axis(self) -> ConnectedAxis | None:
        """The ranks over which the gradient is summed; ``None``: as for most parameters."""
        return self.ranks.gradients

    @property
    def matrices(self) -> int:
        """As in ``Cut``: the experts of which this rank has all, or a part of each."""
        return len(self.ranks.own_experts(self.experts))


Holding: TypeAlias = Cut | Whole | OfExperts

WHOLE: Final = Whole()
"""The default, for parameters that a layer does not declare."""


@runtime_checkable
class SaysHoldings(Protocol):
    """A module that declares parameters that are cut, or applied to the rank's own heads.

    Attributes:
        holdings: how the ranks hold these parameters, by their names in the module.
    """

    holdings: Mapping[str, Holding]


def holdings_of(module: nn.Module) -> dict[str, Holding]:
    """Return how the ranks hold every parameter of a module, by its name in the module."""
    said: dict[str, Holding] = {}
    for prefix, part in module.named_modules():
        if isinstance(part, SaysHoldings):
            said |= {f"{prefix}.{name}".lstrip("."): how for name, how in part.holdings.items()}
    return {name: said.get(name, WHOLE) for name, _ in module.named_parameters()}
