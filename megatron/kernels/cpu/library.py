"""The compiled functions of ``cpu_kernels.cpp``."""

import logging
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

import torch
from torch import Tensor

from megatron.native.compile import reason
from megatron.native.extensions import CPU_KERNELS, LOAD_ERRORS, load_extension

Library: TypeAlias = ModuleType
"""Functions that take tensors as their ``data_ptr()``, and sizes. They run in the calling thread,
without the interpreter's lock."""

_LOG = logging.getLogger(__name__)


def cpu_library(folder: Path | None = None) -> Library | None:
    """Return the library, compiled if necessary; ``None`` if it cannot be compiled.

    In that case the log gives the reason.

    Args:
        folder: folder of compiled libraries, by default the project's.
    """
    try:
        return load_extension(CPU_KERNELS, folder)
    except LOAD_ERRORS as error:
        _LOG.warning("elementwise work runs in PyTorch, slower and no finer: %s", reason(error))
        return None


def expect(dtype: torch.dtype, *tensors: Tensor) -> None:
    """Assert that ``tensors`` have the type and layout that C++, given only pointers, assumes."""
    for tensor in tensors:
        assert tensor.dtype == dtype
        assert tensor.is_contiguous()
        assert tensor.device.type == "cpu"
