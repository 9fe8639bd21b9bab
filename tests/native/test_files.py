"""Complete-or-absent files and the choice of the cache folder."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.native import files
from megatron.native.files import atomic_path, cache_root, locked


def test_success_replaces_the_file_at_once(tmp_path: Path) -> None:
    target = tmp_path / "x.txt"
    target.write_text("old")
    with atomic_path(target) as temporary:
        temporary.write_text("new")
        assert target.read_text() == "old"
    assert target.read_text() == "new"
    assert os.listdir(tmp_path) == ["x.txt"]


def test_failure_leaves_no_trace(tmp_path: Path) -> None:
    def interrupted() -> None:
        with atomic_path(tmp_path / "x.txt") as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("chosen", "xdg", "expected"),
    [
        ("/a/b", "/x", "/a/b"),
        (None, "/x", "/x/megatron-vocab-parallel"),
        (None, None, "/home/me/.cache/megatron-vocab-parallel"),
        ("", "", "/home/me/.cache/megatron-vocab-parallel"),
    ],
)
def test_cache_root_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, chosen: str | None, xdg: str | None, expected: str
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    for name, value in (("MEGATRON_CACHE", chosen), ("XDG_CACHE_HOME", xdg)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert cache_root() == Path(expected)


HOLDS = """
import sys
from pathlib import Path
from megatron.native.files import locked
with locked(Path(sys.argv[1])):
    print("holds", flush=True)
    sys.stdin.read()
"""
"""Holds a lock until its input ends."""


def test_who_waits_for_a_lock_says_for_whom_and_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lock = tmp_path / ".text-8k.lock"
    command = [sys.executable, "-c", HOLDS, str(lock)]
    monkeypatch.setattr(files, "TELL_AFTER", 0.0)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"holds\n"
        monkeypatch.setattr(time, "sleep", lambda _: holder.stdin.close())
        with locked(lock):
            pass
    [said] = caplog.messages
    assert re.fullmatch(rf"waited 0 s for process {holder.pid} on .*, which makes .*/text-8k", said)
