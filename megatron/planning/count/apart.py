"""Runs a count apart from the code that asks for it, and without PyTorch's compiler.

PyTorch's rules for the shapes of results on ``meta`` are Python functions that the compiler leaves
alone. At the first call of such a function PyTorch imports ``torch._dynamo``, which makes the
function's *mark*: a second function that the compiler does not look into. The import takes 2 CPU
seconds and 800 modules (PyTorch 2.13), as long as all other imports of a process. A count compiles
nothing, so that each function may be its own mark while the count runs.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain
from types import CellType, FunctionType
from typing import Final, TypeVar

import torch
from torch._decomp import global_decomposition_table as _rules_of_shapes

T = TypeVar("T")

_COMPILER: Final = "torch._dynamo"
_MARK: Final = "__dynamo_disable"
"""The attribute of a function in which PyTorch keeps the mark (``torch/_compile.py``)."""


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
        with _own_marks():
            return count()
    finally:
        torch.set_rng_state(state)


@contextmanager
def _own_marks() -> Iterator[None]:
    """Let functions without a mark be their own marks in this context.

    If another thread uses such a function meanwhile, the function does the same. If PyTorch keeps
    marks in another way, the count imports the compiler, and its result is the same.
    """
    marked: list[FunctionType] = []
    if _COMPILER not in sys.modules:
        number = sum(map(len, _rules_of_shapes.values()))
        marked = [own for own in _left_alone(number) if not hasattr(own, _MARK)]
    for own in marked:
        setattr(own, _MARK, own)
    try:
        yield
    finally:
        for own in marked:
            if getattr(own, _MARK, None) is own:
                delattr(own, _MARK)


@lru_cache(1)
def _left_alone(number: int) -> list[FunctionType]:
    """Return the functions among the rules for shapes that get a mark at their first call.

    PyTorch's decorator for such a function, and decorators around it, keep the function in their
    closures. There are ``number`` rules; a module that is imported later may add some.
    """
    decorated = torch._disable_dynamo(_left_alone).__code__
    todo: list[object] = list(chain.from_iterable(map(dict.values, _rules_of_shapes.values())))
    seen: set[FunctionType] = set()
    found: list[FunctionType] = []
    while todo:
        function = todo.pop()
        if not isinstance(function, FunctionType) or function in seen:
            continue
        seen.add(function)
        kept = list(_contents(function.__closure__ or ()))
        todo += kept
        if function.__code__ is decorated:
            found += (own for own in kept if isinstance(own, FunctionType))
    return found


def _contents(cells: Iterable[CellType]) -> Iterator[object]:
    for cell in cells:
        try:
            yield cell.cell_contents
        except ValueError:  # the cell is empty
            continue
