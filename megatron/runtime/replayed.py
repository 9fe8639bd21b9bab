"""A graph of launches: what records work once, and launches it again and again on its memory."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeAlias

import torch

Work: TypeAlias = Callable[[], None]


class Graph(Protocol):
    """Launches that can be repeated on the same memory."""

    def capture(self, work: Work) -> None:
        """Record the launches of ``work`` without running them; only ``replay`` gives results."""
        ...

    def replay(self) -> None:
        """Launch the recorded work."""
        ...

    def reset(self) -> None:
        """Let go of the recorded work; the graph is not used any more."""
        ...


class SlotMemory(Protocol):
    """The memory of one slot, which no other slot uses."""

    def graph(self) -> Graph:
        """Return a graph that shares memory with the other graphs of this slot.

        What one graph has freed, another may use. So graphs are replayed in the order in which they
        were captured, and no replay is left out while a result of an earlier one is still read.
        (Graphs whose results are copied out at once, as those of IF and IB, need no order.)
        """
        ...

    def lasting(self) -> AbstractContextManager[object]:
        """Return a context for tensors that are made outside of graphs and stay with the slot."""
        ...


NewSlot: TypeAlias = Callable[[str], SlotMemory]
"""Returns the memory of a new slot; the name tells what the slot is for."""


class CudaGraph:
    """A graph of CUDA.

    Args:
        pool: memory that the graphs of a slot share; a ``torch.cuda.graph_pool_handle()``.
    """

    def __init__(self, pool: Any) -> None:
        self._graph, self._pool = torch.cuda.CUDAGraph(), pool

    def capture(self, work: Work) -> None:
        """See ``Graph``; other threads, such as NCCL's, may launch work during the capture."""
        with torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local"):
            work()

    def replay(self) -> None:
        """See ``Graph``."""
        self._graph.replay()

    def reset(self) -> None:
        """See ``Graph``."""
        # The last replay may still run.
        torch.cuda.current_stream().synchronize()
        self._graph.reset()


class CudaSlot:
    """The memory of a slot on a GPU: a pool of PyTorch's allocator for graphs alone."""

    def __init__(self, name: str) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def graph(self) -> CudaGraph:
        """See ``SlotMemory``."""
        return CudaGraph(self._pool)

    def lasting(self) -> AbstractContextManager[object]:
        """See ``SlotMemory``; these tensors are in the memory that everything else uses."""
        return nullcontext()


class Replayed:
    """One pass of a slot: captured once, then replayed.

    Args:
        graph: records and replays the pass.
        work: launches it.
    """

    def __init__(self, graph: Graph, work: Work) -> None:
        self._graph, self._work = graph, work
        self._is_captured = False

    def run(self) -> None:
        """Run the pass."""
        if not self._is_captured:
            self._graph.capture(self._work)
            self._is_captured = True
        self._graph.replay()

    def close(self) -> None:
        """Let go of the graph, and of the work, whose owner would refer to itself by it."""
        if self._is_captured:
            self._graph.reset()
        self._work = _closed


def _closed() -> None:
    raise AssertionError("the graph was let go of")
