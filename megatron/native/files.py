"""Files that other processes read: complete or absent, and made by one process at a time.

A reader never sees half a file, because writers work under a temporary name in the same folder and
rename the file when done. A lock keeps processes from doing the same slow work twice.
"""

import fcntl
import logging
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TextIO

_LOG = logging.getLogger(__name__)

TELL_AFTER: Final = 1.0
"""Seconds after which a process says that it waits for another one."""

TELL_AGAIN: Final = 30.0
"""Seconds after which the process says so again."""

_PAUSE: Final = 0.1
"""Seconds between two attempts to get a lock."""

LARGEST_TEXT: Final = 1 << 30
"""Bytes of the largest text file that is read; a larger file is neither a plan nor costs."""


def cache_root() -> Path:
    """Return the folder of all files that this project makes and can make again.

    Returns:
        ``$MEGATRON_CACHE``, else ``$XDG_CACHE_HOME/megatron-vocab-parallel``, else the same name
        under ``~/.cache``. The folder need not exist.
    """
    if chosen := os.environ.get("MEGATRON_CACHE"):
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "megatron-vocab-parallel"


def temporary_name(path: Path) -> Path:
    """A hidden name beside ``path`` that no other process or call uses."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")


def sync(path: Path) -> None:
    """Forces a finished file to disk, so that a later rename cannot outlive its content."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Lets the block write a temporary file that becomes ``path`` when the block succeeds.

    Processes may race: each renames its own complete file and the last one stays.

    Args:
        path: the file to make; its folder must exist.

    Yields:
        The temporary name to write to.
    """
    temporary = temporary_name(path)
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock while the block runs; other processes wait, and log that they do.

    The kernel drops the lock when its holder dies, so a killed process blocks nobody. The lock
    file itself stays: removing it would let a third process lock a different file of that name.

    Args:
        path: the lock file; it and its folder are made when missing.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        _lock(file, path)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def read_text(path: Path) -> str:
    """Return the content of a text file that a user has named.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is a pipe, too large or no text; the message is to follow its name.
    """
    if path.is_fifo():  # opening it waits for somebody to write to it, perhaps for ever
        raise ValueError("is a pipe: give a file")
    with path.open("rb") as file:
        content = file.read(LARGEST_TEXT + 1)
    if len(content) > LARGEST_TEXT:
        raise ValueError(f"has more than {LARGEST_TEXT:,} bytes: give another file")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"is no text: byte {error.start + 1} of it is {content[error.start]:#04x}"
        ) from error
    if "\0" in text:
        raise ValueError("is no text: there are zeros in it")
    return text


def write_text(path: Path, text: str) -> None:
    """Write a text file; other processes find all of the new text, or the old file.

    A path that is no regular file, such as ``/dev/stdout``, is written to directly. A link stays a
    link.

    Raises:
        OSError: the file cannot be written; the message names ``path``.
    """
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
            return
        with atomic_path(path.resolve()) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        error.filename, error.filename2 = str(path), None
        raise


def _lock(file: TextIO, path: Path) -> None:
    """Wait for an exclusive lock, and log now and then which process holds it."""
    begin, tell = time.monotonic(), TELL_AFTER
    while not _is_locked_by_us(file):
        waited = time.monotonic() - begin
        if waited >= tell:
            tell += TELL_AGAIN
            file.seek(0)
            holder = file.read() or "another process"
            made = path.with_name(path.name.removeprefix(".").removesuffix(".lock"))
            _LOG.warning("waited %.0f s for %s, which makes %s", waited, holder, made)
        time.sleep(_PAUSE)


def _is_locked_by_us(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
