"""Keeps PyTorch from importing its compiler where shapes are asked for and nothing is compiled.

The rules by which operations on ``meta`` find their shapes are marked as functions that the
compiler leaves alone. When such a function is first called, PyTorch imports ``torch._dynamo`` to
mark it. That takes 2 CPU seconds and 800 modules (PyTorch 2.13), as long as all other imports of a
process. Within ``no_compiler`` the function is left without a mark.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final

import torch

_NAME: Final = "torch._dynamo"


@contextmanager
def no_compiler() -> Iterator[None]:
    """Stand in for the compiler, unless it is imported already; later imports find the real one."""
    if _NAME in sys.modules:
        yield
        return
    stand_in = ModuleType(_NAME)
    vars(stand_in)["disable"] = _unmarked
    sys.modules[_NAME] = stand_in
    vars(torch)["_dynamo"] = stand_in
    try:
        yield
    finally:
        del sys.modules[_NAME]
        del vars(torch)["_dynamo"]


def _unmarked(function: Callable[..., Any], *_: object, **__: object) -> Callable[..., Any]:
    return function
