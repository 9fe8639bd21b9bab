"""Runs the same function on many inputs in other processes, and gives results in input order."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

In = TypeVar("In")
Out = TypeVar("Out")

_WAITING = 3  # inputs per worker that are submitted and whose results are not yet taken


def in_order(
    work: Callable[[In], Out], inputs: Iterable[In], workers: int
) -> Iterator[tuple[In, Out]]:
    """Yield every input with its result, in order; only a few are in memory at a time.

    Args:
        work: a function that other processes can import.
        inputs: read in this process.
        workers: number of processes; 1: this process does the work.

    Raises:
        ValueError: a process died.
    """
    if workers == 1:
        yield from ((item, work(item)) for item in inputs)
        return
    # A fork of this process could inherit a lock that nobody releases. The fork server only
    # imports modules, so its forks inherit no held lock and need not import the modules again.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", __name__, _module_of(work)])
    pool = ProcessPoolExecutor(workers, context, _initialize)
    try:
        yield from _results(pool, work, inputs, _WAITING * workers)
    except BrokenProcessPool as error:
        raise ValueError(
            f"one of {workers} processes died, perhaps killed for its memory: the same command "
            "goes on where this one was; give fewer --workers"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _results(
    pool: ProcessPoolExecutor, work: Callable[[In], Out], inputs: Iterable[In], most: int
) -> Iterator[tuple[In, Out]]:
    waiting: deque[tuple[In, Future[Out]]] = deque()
    for item in inputs:
        waiting.append((item, pool.submit(work, item)))
        if len(waiting) >= most:
            first, future = waiting.popleft()
            yield first, future.result()
    for first, future in waiting:
        yield first, future.result()


def _module_of(work: Callable[..., object]) -> str:
    return str(getattr(work, "func", work).__module__)


def _initialize() -> None:
    """A worker leaves interrupts to its parent, uses one core, and does not outlive its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has a parent"

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
