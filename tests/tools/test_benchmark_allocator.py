"""Measurements run with the allocator that the launcher would choose."""

import os
from pathlib import Path

import pytest
from launch.made_up_machine import ALLOCATOR, Machine

from tools.benchmarking.allocator import allocator, allocator_name

KEPT = "dirty_decay_ms:-1,muzzy_decay_ms:-1"


@pytest.mark.parametrize(
    ("libraries", "environment", "name"),
    [
        (["libjemalloc.so.2"], {}, f"jemalloc with {KEPT}"),
        (["libjemalloc.so.2"], {"MALLOC_CONF": ""}, f"jemalloc with {KEPT}"),
        (["libjemalloc.so.2"], {"MALLOC_CONF": "narenas:1"}, "jemalloc with narenas:1"),
        (["libjemalloc.so.2"], {"LD_PRELOAD": ""}, "the C library's malloc"),
        (["libjemalloc.so.2"], {"LD_PRELOAD": "libtcmalloc.so.4"}, "libtcmalloc.so.4"),
        ([], {"LD_PRELOAD": "/opt/libjemalloc.so.2"}, "jemalloc with its own settings"),
        (["libjemalloc.so.1"], {"MALLOC_MMAP_MAX_": "7"}, "the C library's malloc"),
        ([], {"MALLOC_TRIM_THRESHOLD_": ""}, "the C library's malloc"),
    ],
)
def test_allocator_is_the_launchers(
    libraries: list[str],
    environment: dict[str, str],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched = Machine(tmp_path, libraries=libraries).line(**environment).environment
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)  # the machine's own ldconfig

    assert allocator(environment) == {k: v for k, v in launched.items() if k in ALLOCATOR}
    assert allocator_name(environment) == name
