"""Graphs of a pretended GPU, with memory of their own as PyTorch's allocator gives it to graphs.

A pool grows when a capture needs more than earlier captures have left free, and never shrinks. A
capture runs on a stream of its own, as ``torch.cuda.graph`` does, and a replay on that of the
passes. Which memory a replay uses is not entered into the ledger: ``RecordedGraph`` checks that.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from pretended_gpu.gpu import PretendedGpu
from pretended_gpu.order import Pool


class PooledSlot:
    """See ``SlotMemory``."""

    def __init__(self, gpu: PretendedGpu, name: str) -> None:
        self._gpu, self._pool = gpu, Pool()

    def graph(self) -> "PooledGraph":
        """See ``SlotMemory``."""
        return PooledGraph(self._gpu, self._pool)

    def lasting(self) -> AbstractContextManager[object]:
        """See ``SlotMemory``."""
        return nullcontext()


class PooledGraph:
    """See ``Graph``."""

    def __init__(self, gpu: PretendedGpu, pool: Pool) -> None:
        self._gpu, self._pool = gpu, pool

    def capture(self, work: Callable[[], None]) -> None:
        """See ``Graph``."""
        with self._gpu.capturing(self._pool):
            work()

    def replay(self) -> None:
        """See ``Graph``."""
        self._gpu.streams.issue("a replay", self._gpu.current_stream())

    def reset(self) -> None:
        """See ``Graph``."""
