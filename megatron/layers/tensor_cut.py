"""What a layer says of how tensor-parallel ranks hold its parameters.

A parameter is *cut*, or every rank holds all of it. What is whole gets a gradient on every rank. If
the ranks use it for different tokens or heads, these gradients are parts of a sum. A layer says
only what cannot be seen from outside: which parameters are cut, and which serve the rank's own
heads. Everything else is whole and serves the tokens that a rank has outside of attention and MLP.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias, runtime_checkable

from torch import nn

from megatron.parallel.box import Piece, Shape, shard, whole
from megatron.parallel.tensor import TensorParallel


@dataclass(frozen=True)
class Cut:
    """A parameter of which every tensor rank holds an equal part.

    Attributes:
        dimension: is cut.
        fused: number of equal tensors that lie one after the other in ``dimension``, each of which
            is cut for itself: 2 for SwiGLU's gate and up projection.
    """

    dimension: int
    fused: int = 1

    def whole_shape(self, own: Shape, tensor: TensorParallel) -> Shape:
        """Return the shape of the whole tensor, given that of a rank's part."""
        cut = own[self.dimension] * tensor.size
        return (*own[: self.dimension], cut, *own[self.dimension + 1 :])

    def pieces(self, own: Shape, tensor: TensorParallel) -> tuple[Piece, ...]:
        """Return the boxes of this rank, given the shape of its part."""
        shape = self.whole_shape(own, tensor)
        return shard(shape, self.dimension, tensor.rank, tensor.size, self.fused)

    def is_copy(self, tensor: TensorParallel) -> bool:
        """Return whether rank 0 of the tensor axis holds the same boxes: never."""
        return False

    def is_partial(self, tensor: TensorParallel) -> bool:
        """Return whether other ranks hold parts of the same gradient: never."""
        return False


@dataclass(frozen=True)
class Whole:
    """A parameter that every tensor rank holds whole.

    Attributes:
        for_own_heads: whether each rank applies it to its own heads, not to the tokens that it has.
    """

    for_own_heads: bool = False

    def whole_shape(self, own: Shape, tensor: TensorParallel) -> Shape:
        """As in ``Cut``."""
        return own

    def pieces(self, own: Shape, tensor: TensorParallel) -> tuple[Piece, ...]:
        """As in ``Cut``."""
        return whole(own)

    def is_copy(self, tensor: TensorParallel) -> bool:
        """As in ``Cut``: on all ranks but the first."""
        return tensor.rank > 0

    def is_partial(self, tensor: TensorParallel) -> bool:
        """As in ``Cut``: where the ranks apply it to different numbers."""
        return (tensor.size if self.for_own_heads else tensor.sequence_parts) > 1


Holding: TypeAlias = Cut | Whole

WHOLE: Final = Whole()
"""How a parameter is held of which a layer says nothing."""


@runtime_checkable
class SaysHoldings(Protocol):
    """A module some of whose parameters are cut or serve the rank's own heads.

    Attributes:
        holdings: how these parameters are held, by their names in the module.
    """

    holdings: Mapping[str, Holding]


def holdings_of(module: nn.Module) -> dict[str, Holding]:
    """Return how every parameter of a module is held, by its name there."""
    said: dict[str, Holding] = {}
    for prefix, part in module.named_modules():
        if isinstance(part, SaysHoldings):
            said |= {f"{prefix}.{name}".lstrip("."): how for name, how in part.holdings.items()}
    return {name: said.get(name, WHOLE) for name, _ in module.named_parameters()}
