"""Processes that have the guard, for tests: torch must not be there before it is."""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any, TypeVar

from pretended_gpu.load import load_guard

T = TypeVar("T")

PATIENCE = 300.0
"""Seconds; a rank takes one or two."""


class GpuPool:
    """Runs functions in processes that may have pretended GPUs."""

    def __init__(self, executor: ProcessPoolExecutor) -> None:
        self._executor = executor

    def map(self, function: Callable[..., T], *arguments: Any, ranks: int) -> list[T]:
        """Return ``function(*arguments, rank)`` of every rank, found side by side."""
        running = [self._executor.submit(function, *arguments, rank) for rank in range(ranks)]
        return [each.result(PATIENCE) for each in running]


@contextmanager
def gpu_pool(workers: int = 2) -> Iterator[GpuPool]:
    """Start processes, each with the guard; afterwards they are gone."""
    assert sys.platform == "linux", "elsewhere calls within libtorch do not find the guard"
    with ProcessPoolExecutor(workers, get_context("spawn"), load_guard) as executor:
        yield GpuPool(executor)
