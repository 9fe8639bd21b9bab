"""The memory allocator of ranks that are measured on CPUs: the choice of pretrain_gpt.sh."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from typing import Final

JEMALLOC: Final = "libjemalloc.so.2"


def allocator(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return environment variables with which the allocator of ranks keeps freed memory.

    glibc and jemalloc both read them as a process starts. jemalloc is taken where it is installed
    and ``LD_PRELOAD`` is not set.

    Args:
        environment: of this process.
    """
    variables = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
    if "LD_PRELOAD" not in environment and _has_library(JEMALLOC):
        variables["LD_PRELOAD"] = JEMALLOC
        variables["MALLOC_CONF"] = "dirty_decay_ms:-1,muzzy_decay_ms:-1"
    return {name: environment.get(name) or value for name, value in variables.items()}


def allocator_name(environment: Mapping[str, str] = os.environ) -> str:
    """Return the name of the ranks' allocator, or of a preloaded library that may be one.

    Args:
        environment: of this process.
    """
    of_ranks = {**environment, **allocator(environment)}
    preloaded = of_ranks.get("LD_PRELOAD", "")
    if JEMALLOC not in preloaded:
        return preloaded or "the C library's malloc"
    return f"jemalloc with {of_ranks.get('MALLOC_CONF') or 'its own settings'}"


def _has_library(name: str) -> bool:
    """Whether the cache of the dynamic linker knows the shared library ``name``."""
    ldconfig = shutil.which("ldconfig", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if ldconfig is None:
        return False
    listing = subprocess.run([ldconfig, "-p"], capture_output=True, text=True).stdout
    return any(line.split()[:1] == [name] for line in listing.splitlines())
