"""Two jobs never save to one folder; a dead one is in nobody's way."""

import errno
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from megatron.checkpoint import folder, lock, storage
from megatron.checkpoint.lock import InUseError
from megatron.parallel.groups import ConnectedAxis

HOLDER = """
import sys, time
from pathlib import Path
from megatron.checkpoint import lock
with lock.held(Path(sys.argv[1]), 0):
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
"""


@contextmanager
def other_job(root: Path, seconds: float = 60) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock."""
    command = [sys.executable, "-c", HOLDER, str(root), str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_second_job_is_told_of_the_first_and_a_dead_one_is_not_in_the_way(tmp_path: Path) -> None:
    with other_job(tmp_path) as first:
        with pytest.raises(InUseError) as told, lock.held(tmp_path, 0):
            pass
        said = str(told.value)
        assert f"{tmp_path} is in use: process {first.pid} of {os.uname().nodename}, since" in said
        assert re.search(r"since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\+00:00, saves there", said)
        first.send_signal(signal.SIGKILL)
        first.wait()
        with lock.held(tmp_path, 0) as own:
            assert own.note is None


def test_a_job_waits_for_one_that_is_about_to_end(tmp_path: Path) -> None:
    with other_job(tmp_path, 0.5):
        begun = time.monotonic()
        with lock.held(tmp_path, 60):
            assert time.monotonic() - begun < 60


def test_a_folder_that_was_removed_is_locked_again(tmp_path: Path) -> None:
    root = tmp_path / "saves"
    with lock.held(root, 0) as own:
        own.keep()
        shutil.rmtree(root)
        own.keep()
        with pytest.raises(InUseError), lock.held(root, 0):
            pass
        shutil.rmtree(root)
        with other_job(root) as other, pytest.raises(InUseError, match=f"process {other.pid} of"):
            own.keep()


def test_nothing_is_written_where_another_job_has_begun_to_save(tmp_path: Path) -> None:
    root, alone = tmp_path / "saves", ConnectedAxis("world", 0, (0,))
    with lock.held(root, 0) as own:
        storage.write(root, 1, {}, {}, alone, lock=own)
        shutil.rmtree(root)
        with other_job(root) as other:
            partial = folder.begin(root, 2)  # the other job's
            for _ in range(2):
                with pytest.raises(storage.SaveError, match=f"process {other.pid} of"):
                    storage.write(root, 2, {}, {}, alone, lock=own)
            assert partial.exists()
            assert folder.complete(root) == []
            other.kill()
            other.wait()
        storage.write(root, 2, {}, {}, alone, lock=own)
        assert folder.complete(root) == [2]


def test_whoever_holds_the_lock_without_a_word_is_another_job(tmp_path: Path) -> None:
    with lock.held(tmp_path, 0):
        (tmp_path / lock.LOCK).write_text("[" * 100_000)
        with pytest.raises(InUseError, match="another job saves there"), lock.held(tmp_path, 0):
            pass
    with lock.held(tmp_path / "new" / "folder", 0):
        pass


def test_a_file_system_without_locks_is_noted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def unknown(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unknown)
    with lock.held(tmp_path) as own:
        assert own.note == (
            f"{tmp_path} cannot be locked ([Errno 37] No locks available): let no other job save "
            "there"
        )


def test_other_faults_of_the_disk_are_raised(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "flock", broken)
    with pytest.raises(OSError, match="Input/output error"), lock.held(tmp_path):
        pass


SIGNATURE: Final = '{"host": "node-7", "pid": 31, "since": "2026-11-28 16:00:00+00:00"}'
TORN: Final = (
    *("\n", " \n", "\0" * 87, "\0" * 4096, SIGNATURE[:20] + "\0" * 40, SIGNATURE + "\0" * 40),
    *(SIGNATURE[:end] for end in range(0, len(SIGNATURE), 3)),
)
OTHER: Final = (
    *("\0" * 4097, "{}", '{"host": "a", "port": 1', '{"hosts', '"', '{"host": "no\0de'),
    *('{"host": "node-7", "pid": 31}', SIGNATURE + "x", "x" + SIGNATURE),
)


@pytest.mark.parametrize("torn", TORN)
def test_a_name_that_was_not_written_to_its_end_is_overwritten(torn: str, tmp_path: Path) -> None:
    (tmp_path / lock.LOCK).write_text(torn)
    with lock.held(tmp_path, 0):
        assert json.loads((tmp_path / lock.LOCK).read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("other", OTHER)
def test_the_beginning_of_another_text_is_left(other: str, tmp_path: Path) -> None:
    (tmp_path / lock.LOCK).write_text(other)
    with pytest.raises(lock.NoLockError, match="of somebody else"), lock.held(tmp_path, 0):
        pass
    assert (tmp_path / lock.LOCK).read_text() == other
