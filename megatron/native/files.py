"""Files that other processes read: complete or absent, and made by one process at a time.

A reader never sees half a file, because writers work under a temporary name in the same folder and
rename the file when done. A lock keeps processes from doing the same slow work twice.

Folders come from strangers, too. So only regular files are read, and none without end; and a link
that lies under a name that this program chose is not followed when the program writes.
"""

import errno
import fcntl
import logging
import os
import secrets
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
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
"""Bytes of the largest file that is read whole; a larger one is no plan, costs or manifest."""

LARGE: Final = 1 << 26
"""Bytes from which on reading a file may take seconds, which the log then tells."""

_PIECE: Final = 1 << 20

_KINDS: Final = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISLNK, "a link"),
)


class FileKindError(OSError):
    """A path that leads to no regular file, or to a larger one than is read.

    Args:
        fault: the fault, as the rest of a sentence that begins with the name of the file.
    """

    def __init__(self, fault: str) -> None:
        super().__init__(f"it {fault}")
        self.fault = fault


def cache_root() -> Path:
    """Return the folder of all files that this project makes and can make again.

    Returns:
        ``$MEGATRON_CACHE``, else ``$XDG_CACHE_HOME/megatron-vocab-parallel``, else the same name
        under ``~/.cache``. The folder need not exist.

    Raises:
        OSError: the user has no home folder, and no variable names another one. A container may run
            under a number that no user has.
    """
    try:
        if chosen := os.environ.get("MEGATRON_CACHE"):
            return Path(chosen).expanduser().absolute()
        base = os.environ.get("XDG_CACHE_HOME")
        return (Path(base) if base else Path.home() / ".cache") / "megatron-vocab-parallel"
    except RuntimeError as error:
        raise OSError(
            f"user {os.getuid()} has no home folder for compiled code and sample data: name a "
            "folder in MEGATRON_CACHE"
        ) from error


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
    with open(path, "a+", opener=unlinked) as file:
        _lock(file, path)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def open_file(path: Path) -> BufferedReader:
    """Open a regular file, or a link to one, to read it; nothing is waited for.

    Raises:
        OSError: the file cannot be opened.
        FileKindError: the path leads to a pipe, a folder or a device.
    """
    return open(path, "rb", opener=_regular)


def read_bytes(path: Path, most: int | None = None, *, is_told: bool = False) -> bytes:
    """Return the content of a regular file.

    Args:
        path: path of the file; links are followed.
        most: bytes of the largest file that is read; ``None``: ``LARGEST_TEXT``.
        is_told: whether the log tells that a large file is read.

    Raises:
        OSError: the file cannot be read.
        FileKindError: the file is not regular, or larger than ``most``.
    """
    most = LARGEST_TEXT if most is None else most
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise FileKindError(f"has more than {most:,} bytes")
        if is_told and size >= LARGE:
            _LOG.warning("reading %s: %.0f MB, which may take a while", path, size / 1e6)
        content = file.read(size + 1)  # Python takes the memory for all that is asked for
        while piece := file.read(_PIECE):  # the file grows, or the system does not know its size
            content += piece
            if len(content) > most:
                raise FileKindError(f"has more than {most:,} bytes")
    return content


def read_text(path: Path) -> str:
    """Return the content of a text file that a user has named.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not regular, too large or no text; the message is to follow its
            name.
    """
    try:
        content = read_bytes(path, is_told=True)
    except FileKindError as error:
        raise ValueError(f"{error.fault}: give another file") from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"is no text: byte {error.start + 1} of it is {content[error.start]:#04x}"
        ) from error
    if "\0" in text:
        raise ValueError("is no text: there are zeros in it")
    return text


def unlinked(path: str, flags: int) -> int:
    """Open a regular file to write to it, under a name that this program has chosen.

    A link is not followed: its target belongs to somebody else. This function is an ``opener`` for
    Python's ``open``, with a mode that truncates nothing.

    Raises:
        OSError: the file cannot be opened.
        FileKindError: the path is a link, a pipe, a folder or a device.
    """
    assert not flags & os.O_TRUNC, "a file is truncated when it is known to be ours"
    return _regular(path, flags | os.O_NOFOLLOW)


def _regular(path: str, flags: int) -> int:
    """Open a path as ``os.open`` does, if it leads to a regular file."""
    try:
        handle = os.open(path, flags | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP and os.path.islink(path):
            raise FileKindError(_kind_in_words(stat.S_IFLNK)) from error
        if error.errno in (errno.EISDIR, errno.ENXIO):  # to write to a folder; a socket or pipe
            raise FileKindError(_kind_in_words(os.stat(path).st_mode)) from error
        raise
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        raise FileKindError(_kind_in_words(mode))
    return handle


def _kind_in_words(mode: int) -> str:
    kind = next((word for is_kind, word in _KINDS if is_kind(mode)), "a device")
    return f"is {kind}, not a file"


def replace_text(path: Path, text: str) -> None:
    """Write a text file under a name that this program has chosen, as ``write_text`` does.

    A link of this name is replaced by the file, and its target stays as it is.

    Raises:
        OSError: the file cannot be written; the message names ``path``.
    """
    with _named(path), atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_text(path: Path, text: str) -> None:
    """Write a text file that a user has named; others find all of the new text, or the old file.

    A path that is no regular file, such as ``/dev/stdout``, is written to directly. A link stays a
    link.

    Raises:
        OSError: the file cannot be written; the message names ``path``.
    """
    with _named(path):
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
        else:
            replace_text(path.resolve(), text)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Let an error of the block name ``path`` instead of a temporary file."""
    try:
        yield
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
