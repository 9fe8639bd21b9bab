"""One job at a time saves to a folder.

A job holds a lock of the kernel on a file in the folder. The kernel drops it when the process ends,
however it ends, so that a dead job is in nobody's way. What is in the file only tells people who
holds the lock.
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


class InUseError(ValueError):
    """Another job saves to the folder; the message says which."""


@contextmanager
def held(root: Path, patience: float = PATIENCE) -> Iterator[str | None]:
    """Hold the lock of a folder of checkpoints while the block runs.

    Args:
        root: the folder; made if it does not exist.
        patience: seconds to wait for the lock.

    Yields:
        Why there is no lock, if the file system has none; else ``None``.

    Raises:
        InUseError: another job holds it.
        OSError: the file cannot be written.
    """
    root.mkdir(parents=True, exist_ok=True)
    with (root / LOCK).open("a+", encoding="utf-8") as file:
        try:
            _acquire(file, patience)
        except BlockingIOError:
            raise InUseError(f"{root} is in use: {_holder(file)} saves there") from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            yield f"{root} cannot be locked ({error}): let no other job save there"
            return
        _sign(file)
        yield None


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
