"""A lock that lets only one job at a time save to a folder.

A job holds a lock of the kernel on a file in the folder. The kernel drops the lock however the
process ends, so a dead job blocks nobody. The content of the file only tells people who holds the
lock.

The folder may come from a stranger. A file of this name that is a link, or holds something else
than the name of a job, is left as it is, and the job does not save there. A name that a job could
not write to its end, as the power or the disk ended, is written anew.

Somebody may remove the folder while a job runs. Another job could then lock a new file of the same
name. So before every save a job checks that the name still belongs to the file that it has locked.
"""

import errno
import fcntl
import json
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final, TextIO

from megatron.native.files import FileKindError, unlinked

LOCK: Final = ".lock"
"""Name of the locked file."""

_LARGEST: Final = 1 << 12
"""Characters that are read of the file; a job writes a hundred."""

PATIENCE: Final = 10.0
"""Seconds to wait for the lock: a launcher may start a job before the last job has ended."""

_BLANKS: Final = "\0 \t\r\n"
"""Characters that a file may have in place of those that were never written."""

_SIGNATURE: Final = (
    ('{"host": "', r'[^"\0]*'),
    ('", "pid": ', r"[0-9]*"),
    (', "since": "', r'[^"\0]*'),
    ('"}', ""),
)
"""Parts of the text that a job writes: characters that are always the same, and a value's form."""

_NO_LOCKS: Final = frozenset({errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})
"""Error numbers of a file system that has no locks."""


class InUseError(OSError):
    """Another job saves to the folder; the message says which."""


class NoLockError(OSError):
    """A path that cannot be a lock; the message names the path, the fault and the way out."""


class FolderLock:
    """The lock of a folder of checkpoints.

    Args:
        root: the folder; made if it does not exist.
        patience: seconds to wait for the lock.

    Attributes:
        note: a warning that the file system has no locks; ``None``: it has.

    Raises:
        InUseError: another job holds the lock.
        NoLockError: there is something else under the name of the lock.
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
            NoLockError: something else has been put under the name of the lock.
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
        file = _opened(self._root / LOCK)
        try:
            _acquire(file, patience)
            _check_content(file, self._root / LOCK)
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


def check_name(root: Path) -> None:
    """Check that what lies under the name of the lock, if anything does, can be locked.

    Raises:
        NoLockError: it is a link, a pipe, a folder or a device.
        OSError: it cannot be opened.
    """
    if os.path.lexists(root / LOCK):
        _opened(root / LOCK).close()


@contextmanager
def held(root: Path, patience: float = PATIENCE) -> Iterator[FolderLock]:
    """Hold a ``FolderLock`` (its arguments and errors) while the ``with`` block runs."""
    lock = FolderLock(root, patience)
    try:
        yield lock
    finally:
        lock.close()


def _opened(path: Path) -> TextIO:
    """Open the file of a lock, and make it if it is missing; its content stays as it is.

    Raises:
        NoLockError: the path is a link, a pipe, a folder or a device.
    """
    try:
        return open(path, "a+", encoding="utf-8", errors="replace", opener=unlinked)
    except FileKindError as error:
        raise NoLockError(
            f"{path} {error.fault}: jobs lock a file of this name; remove it"
        ) from error


def _check_content(file: TextIO, path: Path) -> None:
    """Check that a job may write its name over a file's content: a name, or the beginning of one.

    Raises:
        NoLockError: the file holds something else than the name of a job.
    """
    file.seek(0)
    content = file.read(_LARGEST + 1)
    if len(content) > _LARGEST or (_owner(content) is None and not _is_torn(content)):
        raise NoLockError(
            f"{path} is a file of somebody else, and jobs write their names to a file of this "
            "name; move it away"
        )


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
        owner = _owner(file.read(_LARGEST))
    except OSError:
        owner = None
    if owner is None:
        return "another job"
    return f"process {owner['pid']} of {owner['host']}, since {owner['since']},"


def _is_torn(content: str) -> bool:
    """Return whether a job was ended while it wrote the content, so that blanks are the rest."""
    rest = content.strip(_BLANKS)
    for same, value in _SIGNATURE:
        if not rest.startswith(same):
            return same.startswith(rest)
        rest = re.sub(value, "", rest[len(same) :], count=1)
    return not rest


def _owner(content: str) -> dict[str, Any] | None:
    """Return the values with which a job has signed; ``None``: no job has written the content."""
    try:
        owner = json.loads(content)
    except (ValueError, RecursionError):
        return None
    is_signed = isinstance(owner, dict) and owner.keys() >= {"pid", "host", "since"}
    return owner if is_signed else None
