"""A lock that lets only one job at a time save to a folder.

A job holds a lock of the kernel on a file in the folder. The kernel drops the lock however the
process ends, so a dead job blocks nobody. The content of the file only tells people who holds the
lock.

Somebody may remove the folder while a job runs. Another job could then lock a new file of the same
name. So before every save a job checks that the name still belongs to the file that it has locked.
"""

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Final, TextIO

LOCK: Final = ".lock"
"""Name of the locked file."""

PATIENCE: Final = 10.0
"""Seconds to wait for the lock: a launcher may start a job before the last job has ended."""

_NO_LOCKS: Final = frozenset({errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})
"""Error numbers of a file system that has no locks."""


class InUseError(OSError):
    """Another job saves to the folder; the message says which."""


class FolderLock:
    """The lock of a folder of checkpoints.

    Args:
        root: the folder; made if it does not exist.
        patience: seconds to wait for the lock.

    Attributes:
        note: a warning that the file system has no locks; ``None``: it has.

    Raises:
        InUseError: another job holds the lock.
        OSError: the file cannot be written.
    """

    def __init__(self, root: Path, patience: float = PATIENCE) -> None:
        self._root = root
        self.note: str | None = None
        self._file = self._locked(patience)

    def keep(self) -> None:
        """Lock the folder again if it was removed meanwhile; call this before every save.

        Raises:
            InUseError: another job has locked the folder meanwhile.
            OSError: the file cannot be written.
        """
        try:
            is_there = os.path.samestat(os.stat(self._root / LOCK), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            is_there = False
        if not is_there:
            again = self._locked(0.0)
            self._file.close()
            self._file = again

    def close(self) -> None:
        """Release the folder for other jobs."""
        self._file.close()

    def _locked(self, patience: float) -> TextIO:
        self._root.mkdir(parents=True, exist_ok=True)
        file = (self._root / LOCK).open("a+", encoding="utf-8")
        try:
            _acquire(file, patience)
            _sign(file)
        except BlockingIOError:
            with file:
                raise InUseError(f"{self._root} is in use: {_holder(file)} saves there") from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                file.close()
                raise
            self.note = f"{self._root} cannot be locked ({error}): let no other job save there"
        return file


@contextmanager
def held(root: Path, patience: float = PATIENCE) -> Iterator[FolderLock]:
    """Hold a ``FolderLock`` (its arguments and errors) while the ``with`` block runs."""
    lock = FolderLock(root, patience)
    try:
        yield lock
    finally:
        lock.close()


def _acquire(file: TextIO, patience: float) -> None:
    end = time.monotonic() + patience
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                raise
        time.sleep(0.1)


def _sign(file: TextIO) -> None:
    """Write who holds the lock."""
    since = datetime.now(timezone.utc).isoformat(sep=" ", timespec="seconds")
    file.truncate(0)
    json.dump({"host": socket.gethostname(), "pid": os.getpid(), "since": since}, file)
    file.flush()


def _holder(file: TextIO) -> str:
    """Return who holds the lock, in words."""
    try:
        file.seek(0)
        owner = json.load(file)
        return f"process {owner['pid']} of {owner['host']}, since {owner['since']},"
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return "another job"
