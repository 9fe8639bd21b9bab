"""The library of PyTorch's operators that launch Triton programs."""

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("megatron_kernels", "FRAGMENT")


def operator(schema: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that makes a function the operator of ``schema``, and returns that."""

    def define(function: Callable[..., None]) -> Callable[..., None]:
        name = _LIBRARY.define(schema)
        for key in ("CUDA", "CPU"):
            _LIBRARY.impl(name, function, key)
        _LIBRARY.impl(name, _writes_nothing, "Meta")
        operator: Callable[..., None] = getattr(torch.ops.megatron_kernels, schema.split("(")[0])
        return operator

    return define


def _writes_nothing(*_: Any) -> None:
    """Take the place of a program where tensors have no values."""
