"""Weight gradients that can wait: the protocol of layers that leave weight gradients for W.

If a schedule has W passes (zero bubble, arXiv 2401.10241, section 2), the backward of such a layer
forms the gradient of its input, and hands out the products of its weight gradients as work for
later. ``Linear`` follows the protocol; a layer with products of its own may follow it too.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
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


@runtime_checkable
class GathersFirst(Protocol):
    """A work for later that gathers tensors from other ranks, and then talks to nobody."""

    def begin(self) -> None:
        """Begin to gather; before ``arrive`` the rank calls no collective of the same ranks."""
        ...

    def arrive(self) -> None:
        """Wait for the gathered tensors, which were begun before or begin now."""
        ...

    def __call__(self) -> None:
        """Do the work, after the tensors have arrived."""
        ...


def parts_of(works: list[Callable[[], None]], *, parts_alone: bool) -> Iterator[Callable[[], None]]:
    """Yield the parts of a W; each gathers for the next part while it multiplies.

    A part releases its activations as soon as it is done: nothing else may hold it then.

    Args:
        works: the works that a backward has left, in order; they are taken out.
        parts_alone: whether other passes run between two parts. Then nothing may travel there.
    """
    while works:
        yield partial(_work, works.pop(0), works[0] if works else None, parts_alone)


def _work(
    work: Callable[[], None], following: Callable[[], None] | None, parts_alone: bool
) -> None:
    if not isinstance(work, GathersFirst) or not isinstance(following, GathersFirst):
        work()
        return
    work.arrive()
    following.begin()
    work()
    if parts_alone:
        following.arrive()


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
