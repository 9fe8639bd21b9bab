"""Lanes run communication, and the arithmetic that belongs to it, while passes run.

On CUDA a lane is a side stream. On a CPU it is one worker thread, because gloo blocks the calling
thread. The work of a lane runs in order, and no pass waits for it before it needs the result.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    """A result that may not be there yet."""

    def wait(self) -> T_co:
        """Return the result; on CUDA the current stream waits, the host does not."""
        ...


class Lane(Protocol):
    """A queue of work that is done while passes run."""

    def submit(self, work: Callable[[], T]) -> Pending[T]:
        """Run ``work`` after all earlier work of this lane and of the caller."""
        ...

    def close(self) -> None:
        """Release the lane's resources after waiting for running work."""
        ...


class Done(Generic[T]):
    """A result that needs no waiting."""

    def __init__(self, value: T) -> None:
        self._value = value

    def wait(self) -> T:
        """Return the value."""
        return self._value


class InlineLane:
    """Runs work at once: for a single rank, whose collectives take no time."""

    def submit(self, work: Callable[[], T]) -> Pending[T]:
        """Run ``work`` now."""
        return Done(work())

    def close(self) -> None:
        """Do nothing: there are no resources."""


class MetaLane(InlineLane):
    """Runs work on tensors without values at once, in the autograd mode of the other lanes."""

    def submit(self, work: Callable[[], T]) -> Pending[T]:
        """Run ``work`` now."""
        return Done(_without_gradients(work))


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
        """Queue ``work``; if it raises an exception, the wait for its result raises it again."""
        return _FutureResult(self._pool.submit(_without_gradients, work))

    def close(self) -> None:
        """Drop work that has not begun, and wait for work that has."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def _without_gradients(work: Callable[[], T]) -> T:
    with torch.no_grad():  # autograd's mode is per thread
        return work()


class _StreamResult(Generic[T]):
    def __init__(self, work: Callable[[], T], value: T, done: torch.cuda.Event) -> None:
        self._work: Callable[[], T] | None = work  # keeps inputs until the consumer's stream waits
        self._value = value
        self._done = done

    def wait(self) -> T:
        torch.cuda.current_stream().wait_event(self._done)
        self._work = None
        return self._value

    def synchronize(self) -> None:
        self._done.synchronize()


class StreamLane:
    """One CUDA side stream of high priority, so that collectives get their few processors.

    The side stream allocates results, and the caller's stream uses them. When the caller releases a
    result, later work on the side stream may get the memory of the result. This is safe, because
    the later work first waits for all work that the caller's stream has been given by then. The use
    of the result is part of that work.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=-1)

    def submit(self, work: Callable[[], T]) -> Pending[T]:
        """Issue ``work`` on the side stream, after all work of the current stream so far."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), torch.no_grad():
            value = work()
        return _StreamResult(work, value, self._stream.record_event())

    def close(self) -> None:
        """Wait for running work."""
        self._stream.synchronize()


def wait_on_host(pending: Pending[T]) -> T:
    """Return a result. On CUDA the host waits for it too, and may then read copies on the host."""
    value = pending.wait()
    if isinstance(pending, _StreamResult):
        pending.synchronize()
    return value


def keep_until_used(tensor: Tensor) -> None:
    """Keep the memory of a tensor until the current stream no longer needs it.

    Call it in the work of a lane, before the last reference to the tensor goes. On CUDA the stream
    that allocated the tensor does not wait for the lane then, and could reuse the memory too early.
    """
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream())


def make_lane(device: torch.device, size: int, name: str) -> Lane:
    """Return the lane for a group of ``size`` ranks on ``device``."""
    if size == 1:
        return InlineLane()
    if device.type == "meta":
        return MetaLane()
    return StreamLane(device) if device.type == "cuda" else ThreadLane(name)
