"""Weight gradients that can wait: the protocol of layers that leave weight gradients for W.

If a schedule has W passes (zero bubble, arXiv 2401.10241, section 2), the backward of such a layer
forms the gradient of its input, and hands out the products of its weight gradients as work for
later. ``Linear`` follows the protocol; a layer with products of its own may follow it too.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, Protocol, TypeAlias, cast, runtime_checkable

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
        """Begin to gather. Until ``arrive`` only other works of this kind may call the same ranks.

        All ranks begin works in one order, and let them arrive in the same order.
        """
        ...

    def arrive(self) -> None:
        """Wait for the gathered tensors, which were begun before or begin now."""
        ...

    def __call__(self) -> None:
        """Do the work, after the tensors have arrived."""
        ...


AHEAD: Final = 2
"""Works of a W for which tensors are gathered before their turn. With one work ahead, gatherings
for attention would lie beside the short products of attention alone. The MLP's are longer."""


def parts_of(works: list[Callable[[], None]]) -> Iterator[Callable[[], None]]:
    """Yield the parts of a W; each gathers for later parts while it multiplies.

    Nothing is under way during a work that may call the same ranks itself. A part releases its
    activations as soon as it is done: nothing else may hold it then.

    Args:
        works: the works that a backward has left, in order; they are taken out.
    """
    near = _near(works)
    if near:
        yield partial(_begin, near)
    while works:
        work, begun = works.pop(0), len(near)
        near = _near(works) if isinstance(work, GathersFirst) else []
        yield partial(_work, work, near[max(0, begun - 1) :])


def _near(works: Sequence[Callable[[], None]]) -> list[GathersFirst]:
    """Return the next works, up to the first one that may call the ranks itself."""
    found: list[GathersFirst] = []
    for work in works[:AHEAD]:
        if not isinstance(work, GathersFirst):
            break
        found.append(work)
    return found


def _work(work: Callable[[], None], later: Sequence[GathersFirst]) -> None:
    """Do a work, and begin to gather for later works meanwhile."""
    if isinstance(work, GathersFirst):
        work.arrive()
    _begin(later)
    work()


def _begin(works: Sequence[GathersFirst]) -> None:
    for work in works:
        work.begin()


class HasModules(Protocol):
    """An ``nn.Module``, or another object with modules."""

    def modules(self) -> Iterator[nn.Module]:
        """Return all modules of this object."""
        ...


def deferring_parts(module: HasModules) -> Iterator[DefersWeightGradients]:
    """Yield the parts of a module that can leave weight gradients for later."""
    defers: dict[type, bool] = {}  # a class has the protocol, so one module of it tells
    for part in module.modules():
        kind = type(part)
        if kind not in defers:
            defers[kind] = isinstance(part, DefersWeightGradients)
        if defers[kind]:
            yield cast(DefersWeightGradients, part)


def defer_weight_gradients(module: HasModules, defer: Defer | None) -> None:
    """Split the backward of every part of ``module`` that can wait; ``None``: undo the split."""
    for part in deferring_parts(module):
        part.defer = defer
