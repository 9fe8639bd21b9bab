"""Waits within a pass: for collectives of its own, such as the sums of tensor-parallel ranks.

A slow rank lets the ranks that share a layer with it wait in these collectives, so all their passes
last equally long. Only without the waits can be told which of the ranks computes for longer.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Generic, TypeVar

from megatron.parallel.lanes import Pending

T = TypeVar("T")

Observe = Callable[[], AbstractContextManager[None]]


class Waits:
    """The waits of one rank's passes; every axis of collectives that passes wait for has it.

    Attributes:
        observe: returns a context for a wait; ``None``: no waits are observed.
    """

    def __init__(self) -> None:
        self.observe: Observe | None = None

    def waiting(self) -> AbstractContextManager[None]:
        """Return a context in which the running pass waits for a collective of its own."""
        return nullcontext() if self.observe is None else self.observe()


class Awaited(Generic[T]):
    """A result for which a pass waits, and that tells of the wait."""

    def __init__(self, pending: Pending[T], waits: Waits | None) -> None:
        self._pending, self._waits = pending, waits

    def wait(self) -> T:
        """Return the result, as ``Pending``."""
        with waiting(self._waits):
            return self._pending.wait()


def waiting(waits: Waits | None) -> AbstractContextManager[None]:
    """Return a context in which a pass waits; without ``waits`` nobody is told."""
    return nullcontext() if waits is None else waits.waiting()
