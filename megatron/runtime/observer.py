"""Observers: the executor and the communicator tell them what a rank does in an iteration.

``Recorder`` (runtime/timeline.py) records the times; ``NamedRanges`` gives profilers the names.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, TypeAlias, TypeVar

import torch

from megatron.schedules.needs import Comm
from megatron.schedules.passes import Pass

T = TypeVar("T")

Began: TypeAlias = Callable[[Pass], None]
"""Is told which pass of a pair goes on."""


class Observer(Protocol):
    """Gets notice of every pass, wait and collective."""

    def span(self, item: Pass) -> AbstractContextManager[None]:
        """Return a context in which a pass is executed."""
        ...

    def pair(self, first: Pass, second: Pass) -> AbstractContextManager[Began]:
        """Return a context in which both passes of a pair are executed.

        It gives a function that is told the pass of each turn where the turn begins.
        """
        ...

    def waiting(self, comm: Comm) -> AbstractContextManager[None]:
        """Return a context in which the executor waits for a communication."""
        ...

    def within(self) -> AbstractContextManager[None]:
        """Return a context in which the running pass waits for a collective of its own."""
        ...

    def timed(self, comm: Comm, work: Callable[[], T]) -> Callable[[], T]:
        """Return a collective's ``work`` for a lane, wrapped so that its run is observed."""
        ...


class NamedRanges:
    """Names passes, waits and collectives in PyTorch's profiles, and in NVTX ranges on CUDA.

    NVTX ranges are shown by Nsight. Collectives on CPUs run on a lane's own thread, which PyTorch's
    profiler does not see.

    The observer ``also`` gets every notice too.
    """

    def __init__(self, device: torch.device, also: Observer | None = None) -> None:
        self._cuda = device.type == "cuda"
        self._also = also

    @contextmanager
    def span(self, item: Pass) -> Iterator[None]:
        """Name a pass, as in ``F3.1``."""
        with self._named(str(item)), nullcontext() if self._also is None else self._also.span(item):
            yield

    @contextmanager
    def pair(self, first: Pass, second: Pass) -> Iterator[Began]:
        """Name a pair, as in ``F5|B2``."""
        inner = nullcontext(_unheard) if self._also is None else self._also.pair(first, second)
        with self._named(f"{first}|{second}"), inner as began:
            yield began

    @contextmanager
    def waiting(self, comm: Comm) -> Iterator[None]:
        """Name a wait, as in ``wait C1 3``."""
        inner = nullcontext() if self._also is None else self._also.waiting(comm)
        with self._named(f"wait {comm}"), inner:
            yield

    def within(self) -> AbstractContextManager[None]:
        """Name nothing: profiles show collectives within passes anyway."""
        return nullcontext() if self._also is None else self._also.within()

    def timed(self, comm: Comm, work: Callable[[], T]) -> Callable[[], T]:
        """Name a collective, as in ``C1 3``."""
        if self._also is not None:
            work = self._also.timed(comm, work)

        def named() -> T:
            with self._named(str(comm)):
                return work()

        return named

    @contextmanager
    def _named(self, name: str) -> Iterator[None]:
        nvtx = torch.cuda.nvtx.range(name) if self._cuda else nullcontext()
        with torch.profiler.record_function(name), nvtx:
            yield


def _unheard(item: Pass) -> None:
    """Let a turn begin without notice."""
