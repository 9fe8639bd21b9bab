"""Measurements run with the allocator that the launcher would choose."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from launch.made_up_machine import Machine

import benchmark_allocator as module
from benchmark_allocator import allocator, allocator_name

NAMES = {"LD_PRELOAD", "MALLOC_CONF", "MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_"}


@pytest.mark.parametrize(
    ("installed", "environment", "name"),
    [
        (True, {}, "jemalloc"),
        (True, {"MALLOC_CONF": "narenas:1"}, "jemalloc"),
        (True, {"LD_PRELOAD": ""}, "the C library's malloc"),
        (True, {"LD_PRELOAD": "libtcmalloc.so.4"}, "libtcmalloc.so.4"),
        (False, {"LD_PRELOAD": "/opt/libjemalloc.so.2"}, "jemalloc"),
        (False, {"MALLOC_MMAP_MAX_": "7"}, "the C library's malloc"),
    ],
)
def test_allocator_is_the_launchers(
    installed: bool,
    environment: dict[str, str],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = "libjemalloc.so.2" if installed else None
    monkeypatch.setattr(module, "find_library", lambda _: found)
    launched = Machine(tmp_path, libraries=[found] if found else []).line(**environment)

    expected = {k: v for k, v in launched.environment.items() if k in NAMES}
    assert allocator(environment) == expected
    assert allocator_name(environment) == name
