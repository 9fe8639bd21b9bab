"""A graph for a CPU: it notes every operation with its tensors, and repeats them on their memory.

As a graph of CUDA it knows no Python: no branch is taken again, no number is asked for again, and
results come to the memory where they came before.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.runtime.pass_graphs import NewGraph
from megatron.training.planning.count.launches import tensors_of


class _Noting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # TorchDispatchMode has no types
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        self.calls.append((function, args, kwargs, result))
        return result


class RecordedGraph:
    """See ``Graph``. What is captured is computed at once, so that the first replay does nothing.

    Attributes:
        replays: so many times the operations were repeated, in all graphs.
    """

    replays = 0

    def __init__(self) -> None:
        self._noting = _Noting()
        self._is_fresh = False

    def capture(self, work: Callable[[], None]) -> None:
        """See ``Graph``."""
        with self._noting:
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


def _put(value: Tensor, place: Tensor) -> None:
    """Copy a result to the memory that it had; views and what was written in place are there."""
    if value.untyped_storage()._cdata != place.untyped_storage()._cdata:
        place.data.copy_(value)  # a graph does not count versions


def recorded_graphs() -> NewGraph:
    """Return what makes the graphs of a slot."""
    return RecordedGraph
