"""Lanes run communication, and the arithmetic glued to it, beside the passes.

On CUDA a lane is a side stream; on a CPU it is one worker thread, for gloo blocks the thread that
calls it. Work handed to a lane runs in order; nobody waits for it before its result is needed.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    """Something under way."""

    def wait(self) -> T_co:
        """Return the result; on CUDA the current stream waits, the host does not."""
        ...


class Lane(Protocol):
    """A queue of work beside the passes."""

    def submit(self, work: Callable[[], T]) -> Pending[T]:
        """Run ``work`` after all earlier work of this lane and after what the caller has issued."""
        ...

    def close(self) -> None:
        """Give the lane's resources back; waits for what is under way."""
        ...


class Done(Generic[T]):
    """A result that needs no waiting."""

    def __init__(self, value: T) -> None:
        self._value = value

    def wait(self) -> T:
        """Return the value."""
        return self._value


class InlineLane:
    """Runs work at once: for a single rank, where there is nothing to overlap with."""

    def submit(self, work: Callable[[], T]) -> Pending[T]:
        """Run ``work`` now."""
        return Done(work())

    def close(self) -> None:
        """Nothing to give back."""


class _FutureResult(Generic[T]):
    def __init__(self, future: "Future[T]") -> None:
        self._future = future

    def wait(self) -> T:
        return self._future.result()


class ThreadLane:
    """One worker thread."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    def submit(self, work: Callable[[], T]) -> Pending[T]:
        """Queue ``work``; an exception in it is raised by the wait for its result."""
        return _FutureResult(self._pool.submit(_without_gradients, work))

    def close(self) -> None:
        """Drop what has not begun and wait for what has."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def _without_gradients(work: Callable[[], T]) -> T:
    with torch.no_grad():  # autograd's mode is per thread
        return work()


class _StreamResult(Generic[T]):
    def __init__(self, work: Callable[[], T], value: T, done: torch.cuda.Event) -> None:
        self._work = work  # keeps the inputs alive until the consumer's stream waits
        self._value = value
        self._done = done

    def wait(self) -> T:
        stream = torch.cuda.current_stream()
        stream.wait_event(self._done)
        for tensor in _tensors(self._value):
            # The side stream allocated it, this stream uses it: both must be done before reuse.
            tensor.record_stream(stream)
        return self._value


class StreamLane:
    """One CUDA side stream of high priority, so that collectives get their few processors."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=-1)

    def submit(self, work: Callable[[], T]) -> Pending[T]:
        """Issue ``work`` on the side stream, after all that the current stream holds."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), torch.no_grad():
            value = work()
        return _StreamResult(work, value, self._stream.record_event())

    def close(self) -> None:
        """Wait for what is under way."""
        self._stream.synchronize()


def _tensors(value: object) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif hasattr(value, "__dataclass_fields__"):
        yield from _tensors(list(vars(value).values()))


def keep_until_used(tensor: Tensor) -> None:
    """Keep the memory of a tensor that is let go of until the current stream is done with it.

    On CUDA the stream that allocated it would otherwise reuse the memory before that.
    """
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream())


def make_lane(device: torch.device, size: int, name: str) -> Lane:
    """Return the lane for a group of ``size`` ranks on ``device``."""
    if size == 1:
        return InlineLane()
    return StreamLane(device) if device.type == "cuda" else ThreadLane(name)
