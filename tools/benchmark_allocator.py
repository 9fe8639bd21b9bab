"""The host's allocator in a measurement: what pretrain_gpt.sh sets for ranks on CPUs."""

import os
from collections.abc import Mapping
from ctypes.util import find_library
from typing import Final

JEMALLOC: Final = "libjemalloc.so.2"


def allocator(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables with which ranks are to be started: freed memory is kept.

    glibc and jemalloc both read them as a process starts. jemalloc is taken where it is installed
    and ``LD_PRELOAD`` is not set.

    Args:
        environment: of this process.
    """
    variables = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
    if "LD_PRELOAD" not in environment and find_library("jemalloc") == JEMALLOC:
        variables["LD_PRELOAD"] = JEMALLOC
        variables["MALLOC_CONF"] = "dirty_decay_ms:-1,muzzy_decay_ms:-1"
    return {name: environment.get(name, value) for name, value in variables.items()}


def allocator_name(environment: Mapping[str, str] = os.environ) -> str:
    """Return whose allocator such ranks have, or what is preloaded and may be one.

    Args:
        environment: of this process.
    """
    preloaded = (environment | allocator(environment)).get("LD_PRELOAD", "")
    return "jemalloc" if JEMALLOC in preloaded else preloaded or "the C library's malloc"
