"""The residual stream of a layer, written as x + branch(norm(x)) and computed in fewer passes.

A branch's output is not added at once: the next norm of the stream forms the sum in its own pass
over memory. If a single linear layer reads a norm, the norm may be formed directly as a *factor*:
the input in the form that the layer multiplies, such as 8 bits. A norm may be computed again by the
backward, in place of being kept.

Shapes: b batch, s sequence, h hidden.
"""

from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn

from megatron.layers.linear import FactoredInput, LinearInput
from megatron.layers.norm import LayerNorm, NoNorm, RMSNorm
from megatron.layers.normed_input import read_norm, reader_of
from megatron.layers.recompute import forgotten


class Normed:
    """The norm of a stream, as a branch reads it.

    Args:
        norm: module that computes the norm.
        x_bsh: input of the norm.
        value: output of the norm, [b, s, h], or the output as a factor.
        again: whether the backward computes the norm again.
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
        adds_to_normed: branches add to the norm's output, not to the norm's input.
        norms_again: the backward computes the branches' norms again.
    """

    def __init__(self, x_bsh: Tensor, *, adds_to_normed: bool, norms_again: bool) -> None:
        self._x_bsh = x_bsh
        self._part_bsh: Tensor | None = None
        self._is_added = False
        self._normed_bsh: Tensor | None = None
        self._adds_to_normed, self._norms_again = adds_to_normed, norms_again

    def __add__(self, part_bsh: Tensor) -> "Stream":
        """Return the stream with a branch's output as a summand."""
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
        """The summand that has not been added yet, if there is one."""
        return None if self._is_added else self._part_bsh

    @property
    def _base(self) -> Tensor:
        """The tensor to which the next branch adds."""
        if self._adds_to_normed and self._normed_bsh is not None:
            return self._normed_bsh.to(self._x_bsh.dtype)
        return self.total

    def normed(self, norm: nn.Module, read_by: nn.Module | None = None) -> Normed:
        """Return the norm of the stream, formed in one pass with the stream's last sum.

        Args:
            norm: over h; with a ``NoNorm`` the branch reads the stream.
            read_by: the only branch that reads the norm; ``None``: several branches read it.
        """
        value: LinearInput
        if isinstance(norm, NoNorm):
            self._x_bsh, value = norm.add(self._x_bsh, self._pending)
            self._is_added = True
            return Normed(norm, self._x_bsh, value, again=False)
        assert isinstance(norm, LayerNorm | RMSNorm)
        reader = reader_of(read_by)
        if reader is None or self._adds_to_normed:
            self._x_bsh, value = norm.add(self._x_bsh, self._pending)
            self._normed_bsh = value
        else:
            self._x_bsh, value = read_norm(reader, norm, self._x_bsh, self._pending)
        self._is_added = True
        return Normed(norm, self._x_bsh, value, again=self._norms_again)

    def normed_besides(self, norm: nn.Module) -> Normed:
        """Return a second norm of the stream; ``normed`` must have formed the first."""
        assert self._pending is None, "the first norm has formed the sum"
        return Normed(norm, self._x_bsh, norm(self._x_bsh), again=self._norms_again)
