"""Weight gradients that can wait: the protocol of layers that leave weight gradients for W.

If a schedule has W passes (zero bubble, arXiv 2401.10241, section 2), the backward of such a layer
forms the gradient of its input, and hands out the products of its weight gradients as work for
later. ``Linear`` follows the protocol; a layer with products of its own may follow it too.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

from torch import Tensor, nn

Defer: TypeAlias = Callable[[Callable[[], None]], None]
"""Receives the work that a backward leaves for later."""


@runtime_checkable
class DefersWeightGradients(Protocol):
    """A module that can leave weight gradients for later.

    Attributes:
        defer: receives the work for later, if a parameter of ``deferred`` requires a gradient. The
            work adds the gradients of ``deferred`` to their ``main_grad``, and autograd forms all
            other gradients. ``None``: the backward forms all gradients.
    """

    defer: Defer | None

    @property
    def deferred(self) -> Sequence[Tensor]:
        """The module's own parameters whose gradients the work forms."""
        ...


class HasModules(Protocol):
    """An ``nn.Module``, or another object with modules."""

    def modules(self) -> Iterator[nn.Module]:
        """Return all modules of this object."""
        ...


def deferring_parts(module: HasModules) -> Iterator[DefersWeightGradients]:
    """Yield the parts of a module that can leave weight gradients for later."""
    for part in module.modules():
        if isinstance(part, DefersWeightGradients):
            yield part


def defer_weight_gradients(module: HasModules, defer: Defer | None) -> None:
    """Split the backward of every part of ``module`` that can wait; ``None``: undo the split."""
    for part in deferring_parts(module):
        part.defer = defer
