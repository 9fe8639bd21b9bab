"""Weight gradients that can wait: which parts of a model leave them for W, of which parameters.

If a schedule has W passes (zero bubble, arXiv 2401.10241, section 2), the backward of a part forms
the gradient of its input, and hands out the products of its weight gradients as work for later. A
part says so by a protocol: ``Linear`` is one such part, and a layer with products of its own may be
another.
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
        defer: receives the work for later, if a parameter of ``deferred`` has a gradient at all.
            Autograd then forms all gradients but theirs, and the work adds these to their
            ``main_grad``. ``None``: the backward forms all gradients.
    """

    defer: Defer | None

    @property
    def deferred(self) -> Sequence[Tensor]:
        """The module's own parameters whose gradients the work forms."""
        ...


class HasModules(Protocol):
    """An ``nn.Module``, or what stands for one."""

    def modules(self) -> Iterator[nn.Module]:
        """Return all modules in it."""
        ...


def deferring_parts(module: HasModules) -> Iterator[DefersWeightGradients]:
    """Yield the parts of a module that can leave weight gradients for later."""
    for part in module.modules():
        if isinstance(part, DefersWeightGradients):
            yield part


def defer_weight_gradients(module: HasModules, defer: Defer | None) -> None:
    """Split the backward of every part of ``module`` that can, or join it again with ``None``."""
    for part in deferring_parts(module):
        part.defer = defer
