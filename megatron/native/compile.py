"""Compile one C++ file into a shared library, once per machine, source and set of options."""

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.native.files import atomic_path, locked

COMPILE_ERRORS = (OSError, subprocess.SubprocessError)
"""Errors with which ``compile_library`` fails; callers then fall back and log the reason."""

_LOG = logging.getLogger(__name__)


def library_name(source: Path, options: Sequence[str], identity: str) -> str:
    """Return a name that changes with source, options and identity; see ``compile_library``."""
    digest = hashlib.sha256("\0".join([source.read_text(), *options, identity]).encode())
    return f"{source.stem}_{digest.hexdigest()[:12]}"


def compile_library(
    source: Path,
    options: Sequence[str],
    identity: str,
    cache: Path,
    suffix: str = ".so",
    include: Sequence[str] = (),
) -> Path:
    """Return the library of ``source``, compiling it if it is not in ``cache`` yet.

    Args:
        source: a C++ file. The macro ``MODULE_NAME`` is the library's name without suffix.
        options: options of the compiler, besides those that every shared library gets.
        identity: all other facts that decide the library's content: versions, the processor.
        cache: folder of compiled libraries; one process compiles, the others wait for it.
        suffix: suffix of the library's name.
        include: folders of headers; their paths do not decide the library's content.

    Raises:
        OSError: no compiler is there, or ``cache`` cannot be written.
        subprocess.SubprocessError: the compiler fails.
    """
    name = library_name(source, options, identity)
    library = cache / f"{name}{suffix}"
    if library.exists():
        return library
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise FileNotFoundError("no C++ compiler (c++, g++ or $CXX) found")
    with locked(cache / f".{name}.lock"):
        if not library.exists():
            with atomic_path(library) as temporary:
                headers = (f"-I{folder}" for folder in include)
                _compile([*compiler.split(), *options, *headers], name, source, temporary)
    return library


def processor() -> str:
    """Return a text that differs between processors that cannot run each other's compiled code."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        return f"{platform.machine()} {platform.processor()}"
    lines = cpuinfo.read_text().splitlines()
    return "\n".join(
        sorted({x for x in lines if x.startswith(("flags", "Features", "model name"))})
    )


def reason(error: BaseException) -> str:
    """Return the message for the user about a failed compilation."""
    return str(getattr(error, "stderr", None) or error).strip()


def _compile(compiler: Sequence[str], name: str, source: Path, output: Path) -> None:
    shared = ["-std=c++17", "-fPIC", "-shared", "-fvisibility=hidden", f"-DMODULE_NAME={name}"]
    if sys.platform == "darwin":
        shared += ["-undefined", "dynamic_lookup"]
    _LOG.info("compiling %s, once per machine", source.name)
    command = [*compiler, *shared, str(source), "-o", str(output)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
