"""Complete-or-absent files and the choice of the cache folder."""

import errno
import os
import re
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.native import files
from megatron.native.files import atomic_path, cache_root, locked, read_text, write_text


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


@pytest.mark.parametrize(
    ("content", "text"), [(b"a\r\n\xc3\xa9", "a\r\n\xe9"), (b"\xef\xbb\xbfa", "a"), (b"", "")]
)
def test_a_text_is_read_as_it_is_but_for_its_mark(
    content: bytes, text: str, tmp_path: Path
) -> None:
    (tmp_path / "x").write_bytes(content)
    assert read_text(tmp_path / "x") == text


def test_what_is_no_text_is_refused_and_nothing_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"abc\xff")
    with pytest.raises(ValueError, match="is no text: byte 4 of it is 0xff"):
        read_text(path)
    path.write_bytes(b"a\0b")
    with pytest.raises(ValueError, match="is no text: there are zeros in it"):
        read_text(path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="is a pipe, not a file: give another file"):
        read_text(tmp_path / "pipe")
    with pytest.raises(ValueError, match="is a device, not a file: give another file"):
        read_text(Path("/dev/zero"))
    monkeypatch.setattr(files, "LARGEST_TEXT", 10_000)
    path.write_bytes(b"a" * 10_000)
    assert read_text(path) == "a" * 10_000
    path.write_bytes(b"a" * 10_001)
    with pytest.raises(ValueError, match="has more than 10,000 bytes"):
        read_text(path)


def test_a_text_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    write_text(path, "old")

    def full(_: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(files, "sync", full)
        with pytest.raises(OSError, match=rf"No space left on device: '{path}'"):
            write_text(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["x"]
    with pytest.raises(OSError, match=rf"'{tmp_path}'"):
        write_text(tmp_path, "a folder")


def test_what_is_no_file_is_not_replaced_and_links_stay_links(tmp_path: Path) -> None:
    write_text(Path("/dev/null"), "text")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write_text(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "text"


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
