"""The library of PyTorch's operators that launch Triton programs.

An operator has a schema, and runs on tensors without values, on a machine without Triton too. So
such a machine can say which operators a GPU would launch; only a launch needs the programs. Tensors
with values go straight to the programs, since the way through PyTorch's dispatcher and back to
Python costs the host some microseconds. A mode of PyTorch that watches operators therefore sees
these operators only on tensors without values.
"""

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from megatron.kernels.declared import Declaration, declare

_LIBRARY = torch.library.Library("megatron_kernels", "FRAGMENT")


def operator(
    schema: str, work: Declaration | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that makes a function the operator of ``schema``.

    Args:
        schema: of the operator, with its name.
        work: declares the work of the operator's launch; ``None``: the operator reads and writes
            the tensors of its schema whole, and multiplies no matrices.
    """

    def define(function: Callable[..., None]) -> Callable[..., None]:
        name = _LIBRARY.define(schema)
        if work is not None:
            declare(f"{_LIBRARY.ns}::{name}", work)
        for key in ("CUDA", "CPU"):
            _LIBRARY.impl(name, function, key)
        _LIBRARY.impl(name, _writes_nothing, "Meta")
        operator: Callable[..., None] = getattr(torch.ops.megatron_kernels, schema.split("(")[0])

        @wraps(function)
        def launch(first: object, *others: Any) -> None:
            has_values = type(first) is Tensor and not first.is_meta
            (function if has_values else operator)(first, *others)

        return launch

    return define


class Programs:
    """The Triton programs of one module, which is imported when one of them is first launched.

    Args:
        module: name of the module in ``megatron.kernels.cuda.programs``.

    Raises:
        ImportError: at a launch, if Triton is not installed.
    """

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        """Return a program; later launches find it as an attribute and do not come here."""
        program = getattr(import_module(f"megatron.kernels.cuda.programs.{self._module}"), name)
        setattr(self, name, program)
        return program


def _writes_nothing(*_: Any) -> None:
    """Take the place of a program where tensors have no values."""
