"""Processes that have the guard, for tests: torch must not be there before it is."""

import faulthandler
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from typing import Any, TypeVar

from harness.shared_plans import shared_plans
from pretended_gpu.load import load_guard

T = TypeVar("T")

PATIENCE = 300.0
"""Seconds after which a process is stuck, and ends with its stack; a rank takes one or two."""


class GpuPool:
    """Runs functions in processes that may have pretended GPUs."""

    def __init__(self, executor: ProcessPoolExecutor) -> None:
        self._executor = executor

    def map(self, function: Callable[..., T], *arguments: Any, ranks: int) -> list[T]:
        """Return ``function(*arguments, rank)`` of every rank, found side by side."""
        running = [
            self._executor.submit(_in_time, partial(function, *arguments, rank))
            for rank in range(ranks)
        ]
        return [each.result() for each in running]


def _in_time(function: Callable[[], T]) -> T:
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    try:
        with shared_plans():
            return function()
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextmanager
def gpu_pool(workers: int = 2) -> Iterator[GpuPool]:
    """Start processes, each with the guard; afterwards they are gone."""
    with ProcessPoolExecutor(workers, get_context("spawn"), load_guard) as executor:
        yield GpuPool(executor)
