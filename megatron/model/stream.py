"""The residual stream of a layer, written as x + branch(norm(x)) and computed in fewer passes.

What a branch adds is not added at once: the next norm of the stream forms the sum in its own pass.
A norm that a single linear layer reads may be formed as that layer's factor. A norm may be made
again by the backward, in place of being kept.

Shapes: b batch, s sequence, h hidden.
"""

from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn

from megatron.layers.linear import FactoredInput, LinearInput
from megatron.layers.norm import LayerNorm, RMSNorm
from megatron.layers.normed_input import read_norm, reader_of
from megatron.layers.recompute import forgotten


class Normed:
    """The norm of a stream, as a branch reads it.

    Args:
        norm: forms the norm.
        x_bsh: what the norm is of.
        value: the norm [b, s, h], or the norm as a factor.
        again: whether the backward makes the norm again.
    """

    def __init__(self, norm: nn.Module, x_bsh: Tensor, value: LinearInput, *, again: bool) -> None:
        self.value = value
        self._norm, self._x_bsh, self._again = norm, x_bsh, again

    def reading(self) -> AbstractContextManager[None]:
        """Return the context in which a branch reads the value."""
        if not self._again or isinstance(self.value, FactoredInput):
            return nullcontext()
        return forgotten(self._norm, self._x_bsh, self.value)


class Stream:
    """A residual stream, maybe with a summand that is not added yet.

    Args:
        x_bsh: the stream [b, s, h].
        adds_to_normed: branches add to what their norm returns, not to what the norm reads.
        norms_again: the backward makes the norms again that branches read.
    """

    def __init__(self, x_bsh: Tensor, *, adds_to_normed: bool, norms_again: bool) -> None:
        self._x_bsh = x_bsh
        self._part_bsh: Tensor | None = None
        self._is_added = False
        self._normed_bsh: Tensor | None = None
        self._adds_to_normed, self._norms_again = adds_to_normed, norms_again

    def __add__(self, part_bsh: Tensor) -> "Stream":
        """Return the stream with what a branch adds to it."""
        after = Stream(
            self._base, adds_to_normed=self._adds_to_normed, norms_again=self._norms_again
        )
        after._part_bsh = part_bsh
        return after

    @property
    def total(self) -> Tensor:
        """The stream as a tensor, [b, s, h]."""
        return self._x_bsh if self._pending is None else self._x_bsh + self._pending

    @property
    def _pending(self) -> Tensor | None:
        """The summand, as long as it is not added."""
        return None if self._is_added else self._part_bsh

    @property
    def _base(self) -> Tensor:
        """What the next branch adds to."""
        if self._adds_to_normed and self._normed_bsh is not None:
            return self._normed_bsh.to(self._x_bsh.dtype)
        return self.total

    def normed(self, norm: nn.Module, read_by: nn.Module | None = None) -> Normed:
        """Return the norm of the stream, formed in one pass with the stream's last sum.

        Args:
            norm: over h.
            read_by: the branch that reads the norm; ``None``: several do.
        """
        assert isinstance(norm, LayerNorm | RMSNorm)
        reader = reader_of(read_by)
        value: LinearInput
        if reader is None or self._adds_to_normed:
            self._x_bsh, value = norm.add(self._x_bsh, self._pending)
            self._normed_bsh = value
        else:
            self._x_bsh, value = read_norm(reader, norm, self._x_bsh, self._pending)
        self._is_added = True
        return Normed(norm, self._x_bsh, value, again=self._norms_again)

    def normed_besides(self, norm: nn.Module) -> Normed:
        """Return another norm of a stream of which one is formed already."""
        assert self._pending is None, "the first norm has formed the sum"
        return Normed(norm, self._x_bsh, norm(self._x_bsh), again=self._norms_again)
