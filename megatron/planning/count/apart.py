"""Runs a count apart from the code that asks for it, and without PyTorch's compiler.

The rules by which operations on ``meta`` find their shapes are marked as functions that the
compiler leaves alone. When such a function is first called, PyTorch imports ``torch._dynamo`` to
mark it. That takes 2 CPU seconds and 800 modules (PyTorch 2.13), as long as all other imports of a
process. A count compiles nothing, so it leaves the function without a mark.
"""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import ModuleType
from typing import Final, TypeVar

import torch

T = TypeVar("T")

_COMPILER: Final = "torch._dynamo"


def apart(count: Callable[[], T]) -> T:
    """Return the result of ``count``, which runs in a thread of its own.

    PyTorch keeps its modes by thread: modes that change operations (such as the mode for tensors
    without data), gradients that are off, narrower types (autocast). None of the caller's modes
    holds in the new thread, so the count does not depend on them. A count leaves PyTorch as it was:
    dropout seeds the random generator even for tensors without values, so ``apart`` restores the
    generator's state.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_without_effect, count).result()


def _without_effect(count: Callable[[], T]) -> T:
    state = torch.get_rng_state()
    try:
        with _no_compiler():
            return count()
    finally:
        torch.set_rng_state(state)


@contextmanager
def _no_compiler() -> Iterator[None]:
    """Stand in for the compiler in this context, unless the compiler is imported already."""
    if _COMPILER in sys.modules:
        yield
        return
    stand_in = ModuleType(_COMPILER)
    vars(stand_in)["disable"] = lambda function, *_, **__: function
    sys.modules[_COMPILER] = stand_in
    vars(torch)["_dynamo"] = stand_in
    try:
        yield
    finally:
        del sys.modules[_COMPILER]
        del vars(torch)["_dynamo"]
