"""The compiled functions of ``cpu_kernels.cpp``, for whoever has a slower twin in PyTorch."""

import ctypes
import logging
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from megatron.native.compile import COMPILE_ERRORS, compile_library, processor, reason
from megatron.native.files import cache_root

Library: TypeAlias = ctypes.CDLL
"""The functions of ``cpu_kernels.cpp``; all work in the calling thread, without the interpreter's
lock."""

_SOURCE = Path(__file__).with_name("cpu_kernels.cpp")
_OPTIONS = (
    "-O3",
    "-march=native",
    "-mprefer-vector-width=512",
    "-fopenmp-simd",
    "-fno-math-errno",
    "-fno-trapping-math",
)
_PORTABLE_OPTIONS = ("-O3", "-fopenmp-simd")
_LOG = logging.getLogger(__name__)

_ARGUMENTS = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}
_SIGNATURES = {
    "exp_tile_bf16": "piippp",
    "transpose_bf16": "piip",
    "rescale_add_bf16": "pppii",
    "scale_bf16": "ppiip",
    "add_bf16": "ppi",
    "gelu_bf16": "pipp",
    "multiply_bf16": "ppip",
    "layer_norm_bf16": "pppiifppp",
    "layer_norm_backward_bf16": "pppppiippp",
    "copy_rows_bf16": "piiiipiiiiiiiii",
    "causal_softmax_bf16": "piiif",
    "causal_softmax_backward_bf16": "ppiiif",
}
"""Arguments of every function: pointer, 64-bit integer, float."""


def cpu_library(folder: Path | None = None) -> Library | None:
    """Return the library, compiled on first use, or ``None`` where nothing can be compiled.

    The log says why it could not be.

    Args:
        folder: of compiled libraries, by default the project's.
    """
    folder = folder or cache_root()
    try:
        try:
            path = compile_library(_SOURCE, _OPTIONS, processor(), folder)
        except COMPILE_ERRORS:  # a compiler that does not know the processor's options
            path = compile_library(_SOURCE, _PORTABLE_OPTIONS, processor(), folder)
    except COMPILE_ERRORS as error:
        _LOG.warning("elementwise work runs in PyTorch, slower and no finer: %s", reason(error))
        return None
    library = ctypes.CDLL(str(path))
    for name, letters in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = [_ARGUMENTS[letter] for letter in letters]
        function.restype = None
    return library


def expect(dtype: torch.dtype, *tensors: Tensor) -> None:
    """Assert that ``tensors`` are what C++, which sees pointers only, takes them for."""
    for tensor in tensors:
        assert tensor.dtype == dtype
        assert tensor.is_contiguous()
        assert tensor.device.type == "cpu"
