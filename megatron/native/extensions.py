"""The C++ extensions: where they are, how they are compiled, and how they are loaded.

``setup.py`` builds them at installation if there is a compiler. In a checkout, or if an installed
extension no longer fits its source or the processor, they are compiled on first use, once per
machine. A digest in the extension's file name shows whether it fits: the digest covers everything
that decides the compiler's output. This file uses only the standard library, since ``setup.py``
imports it.
"""

import importlib.util
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from megatron.native.compile import COMPILE_ERRORS, compile_library, library_name, processor
from megatron.native.files import cache_root

LOAD_ERRORS = (*COMPILE_ERRORS, ImportError)
"""Errors with which ``load_extension`` fails; callers then fall back and log the reason."""

_NATIVE = "-march=native"


@dataclass(frozen=True)
class Extension:
    """A module for Python in one C++ file, bound by pybind11.

    Attributes:
        package: package that holds it.
        source: the C++ file, which names its module ``MODULE_NAME``.
        options: sets of compiler options, from the most to the least demanding; the first set that
            works is used.
    """

    package: str
    source: Path
    options: tuple[tuple[str, ...], ...]

    def identity(self, options: Sequence[str]) -> str:
        """Return the facts besides source and options that decide the compiler's output.

        Code for the compiling machine's own processor must not reach another processor in a wheel
        or in a home folder that machines share.
        """
        return _suffix() + (processor() if _NATIVE in options else "")

    def name(self, options: Sequence[str]) -> str:
        """Return the module's name: the stem of the source, and a digest."""
        return library_name(self.source, options, self.identity(options))


_MEGATRON = Path(__file__).resolve().parents[1]

CPU_KERNELS = Extension(
    "megatron.kernels.cpu",
    _MEGATRON / "kernels" / "cpu" / "cpu_kernels.cpp",
    (
        (
            "-O3",
            _NATIVE,
            "-mprefer-vector-width=512",
            "-fopenmp-simd",
            "-fno-math-errno",
            "-fno-trapping-math",
        ),
        ("-O3", "-fopenmp-simd"),
    ),
)
INDEX_BUILDER = Extension(
    "megatron.data",
    _MEGATRON / "data" / "index_builder.cpp",
    # A fused multiply-add would round the blend's deficits differently from NumPy.
    (("-O2", "-ffp-contract=off"),),
)
EXTENSIONS = (CPU_KERNELS, INDEX_BUILDER)


def load_extension(extension: Extension, cache: Path | None = None) -> ModuleType:
    """Return the installed module, else the one in ``cache``, compiled if it is not there yet.

    Args:
        extension: the extension to load.
        cache: folder of compiled modules, by default the project's; one process compiles, the
            others wait for it.

    Raises:
        OSError: no compiler is there, or ``cache`` cannot be written.
        subprocess.SubprocessError: the compiler fails.
        ImportError: pybind11 is missing, or Python cannot import the compiled module.
    """
    *demanding, last = extension.options
    for options in demanding:
        try:
            return _import(_find(extension, options, cache))
        except COMPILE_ERRORS:  # a compiler that does not know the options, or none at all
            continue
    return _import(_find(extension, last, cache))


def _find(extension: Extension, options: Sequence[str], cache: Path | None) -> Path:
    """Return the compiled module, compiling it when it is missing."""
    installed = extension.source.with_name(extension.name(options) + _suffix())
    if installed.exists():
        return installed
    import pybind11  # here, because an installed extension does not need it

    return compile_library(
        extension.source,
        options,
        extension.identity(options),
        cache or cache_root(),
        suffix=_suffix(),
        include=(pybind11.get_include(), sysconfig.get_path("include")),
    )


def _suffix() -> str:
    return str(sysconfig.get_config_var("EXT_SUFFIX"))


def _import(path: Path) -> ModuleType:
    name = path.name.split(".")[0]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not importable by this Python")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
