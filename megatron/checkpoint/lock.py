"""One job at a time saves to a folder.

A job holds a lock of the kernel on a file in the folder. The kernel drops it when the process ends,
however it ends, so that a dead job is in nobody's way. What is in the file only tells people who
holds the lock.

Somebody may remove the folder while a job runs, and with it the name of the locked file. Another
job could then lock a new file of that name. So a job looks at the name again before it saves.
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
"""Name of the file."""

PATIENCE: Final = 10.0
"""Seconds that the last job on a folder has to end: a launcher may start the next one at once."""

_NO_LOCKS: Final = frozenset({errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})
"""What a file system without locks says."""


class InUseError(OSError):
    """Another job saves to the folder; the message says which."""


class FolderLock:
    """The lock of a folder of checkpoints.

    Args:
        root: the folder; made if it does not exist.
        patience: seconds to wait for the lock.

    Attributes:
        note: why there is no lock, if the file system has none; else ``None``.

    Raises:
        InUseError: another job holds it.
        OSError: the file cannot be written.
    """

    def __init__(self, root: Path, patience: float = PATIENCE) -> None:
        self._root = root
        self.note: str | None = None
        self._file = self._locked(patience)

    def keep(self) -> None:
        """Lock the folder again if it was removed since; call it before every save.

        Raises:
            InUseError: another job has locked it since.
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
        """Let another job have the folder."""
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
    """Hold the lock of a folder while the block runs; arguments and errors as of ``FolderLock``."""
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
