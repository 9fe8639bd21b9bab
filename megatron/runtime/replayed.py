"""A graph of launches: what records work once, and launches it again and again on its memory."""

from collections.abc import Callable
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


NewGraph: TypeAlias = Callable[[], Graph]
"""Returns a graph that shares memory with the other graphs of the same slot."""


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


def cuda_graphs() -> NewGraph:
    """Return a function that makes the graphs of one slot, which share memory."""
    pool = torch.cuda.graph_pool_handle()
    return lambda: CudaGraph(pool)


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
