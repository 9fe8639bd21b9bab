"""A graph for a CPU: it notes every operation with its tensors, and repeats them on their memory.

As a graph of CUDA it knows no Python: no branch is taken again, and results come to the memory
where they came before. The host may not read a number of a tensor while a pass is captured. A
collective of ranks that share layers or sequences is one operation. A graph of CUDA may run it
beside others; here each waits for the one before.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.parallel import collectives
from megatron.parallel.lanes import InlineLane, ThreadLane
from megatron.planning.count.launches import tensors_of

COLLECTIVES: Final = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "shift")
"""Functions of ``megatron.parallel.collectives`` that layers call whose ranks share layers or
sequences."""


class _Noting(TorchDispatchMode):
    """Notes every operation of the thread that captures, and every collective as a whole."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # TorchDispatchMode has no types
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self._is_within_collective = False

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Return a context whose work is noted; lanes of other threads go on without notes."""
        thread = threading.get_ident()

        def noted(collective: Callable[..., Any], *args: Any) -> Any:
            if threading.get_ident() != thread or self._is_within_collective:
                return collective(*args)
            self._is_within_collective = True
            try:
                result = collective(*args)
            finally:
                self._is_within_collective = False
            self.calls.append((collective, args, {}, result))
            return result

        submit = ThreadLane.submit

        def submit_here(lane: ThreadLane, work: Callable[[], Any]) -> Any:
            if threading.get_ident() != thread:
                return submit(lane, work)
            with torch.no_grad():
                return InlineLane().submit(work)

        with ExitStack() as stack:
            for name in COLLECTIVES:
                own = partial(noted, getattr(collectives, name))
                stack.enter_context(patch.object(collectives, name, own))
            stack.enter_context(patch.object(ThreadLane, "submit", submit_here))
            stack.enter_context(self)
            yield

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        assert function is not torch.ops.aten._local_scalar_dense.default, (
            "the host reads a number of the device, which a graph of CUDA refuses"
        )
        result = function(*args, **kwargs)
        if not self._is_within_collective:
            self.calls.append((function, args, kwargs, result))
        return result


class RecordedGraph:
    """See ``Graph``. What is captured is computed at once, so that the first replay does nothing.

    Attributes:
        replays: so many times the operations were repeated, in all graphs.
        resets: so many graphs were let go of.
    """

    replays = 0
    resets = 0

    def __init__(self) -> None:
        self._noting = _Noting()
        self._is_fresh = False

    def capture(self, work: Callable[[], None]) -> None:
        """See ``Graph``."""
        with self._noting.capturing():
            work()
        self._is_fresh = True

    @torch.no_grad()
    def replay(self) -> None:
        """See ``Graph``."""
        if self._is_fresh:
            self._is_fresh = False
            return
        RecordedGraph.replays += 1
        for function, args, kwargs, result in self._noting.calls:
            again = function(*args, **kwargs)
            for place, value in zip(tensors_of(result), tensors_of(again), strict=True):
                _put(value, place)

    def reset(self) -> None:
        """See ``Graph``."""
        self._noting.calls.clear()
        RecordedGraph.resets += 1


def _put(value: Tensor, place: Tensor) -> None:
    """Copy a result to the memory that it had; views and what was written in place are there."""
    if value.untyped_storage()._cdata != place.untyped_storage()._cdata:
        place.data.copy_(value)  # a graph does not count versions


class RecordedSlot:
    """See ``SlotMemory``: tensors that are recorded are nobody else's."""

    def __init__(self, name: str) -> None:
        self.name = name

    def graph(self) -> RecordedGraph:
        """See ``SlotMemory``."""
        return RecordedGraph()

    def lasting(self) -> AbstractContextManager[object]:
        """See ``SlotMemory``."""
        return nullcontext()
