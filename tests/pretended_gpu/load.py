"""Loads ``guard.cpp`` into a process that has not imported torch; nor must this module."""

import ctypes
import sys
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from megatron.native.compile import compile_library
from megatron.native.files import cache_root


@cache
def load_guard() -> ctypes.CDLL:
    """Return the library, compiled once per machine; at first before torch, later at any time."""
    assert "torch" not in sys.modules, "the guard comes too late: torch is there"
    torch_spec = find_spec("torch")
    assert torch_spec is not None
    assert torch_spec.origin is not None
    torch = Path(torch_spec.origin).parent
    libraries = torch / "lib"
    options = (
        "-std=c++20",
        f"-I{torch / 'include'}",
        f"-L{libraries}",
        f"-Wl,-rpath,{libraries},--no-as-needed",
        "-lc10",
        "-ltorch_cpu",
    )
    path = compile_library(
        Path(__file__).with_name("guard.cpp"), options, version("torch"), cache_root()
    )
    guard = ctypes.CDLL(str(path))
    guard.current_stream.restype = ctypes.c_int64
    guard.set_current_stream.argtypes = [ctypes.c_int64]
    return guard
