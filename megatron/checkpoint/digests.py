"""Digests of files, formed of parts, so that one processor and several can form them side by side.

The digest of a file is the SHA-256 of the SHA-256 of its parts, laid end to end. A part has
``PART`` bytes, the last one what is left. Sixteen parts are hashed at once where the processor has
registers wide enough, and ranges of a file on several threads: neither hashlib nor the compiled
function keeps Python's lock meanwhile.
"""

import functools
import hashlib
import io
import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Final, TypeAlias

from megatron.native.compile import reason
from megatron.native.extensions import LOAD_ERRORS, PART_DIGESTS, load_extension
from megatron.native.files import cache_root

PART: Final = 1 << 16
"""Bytes of a part."""

_AT_ONCE: Final = 1 << 20
"""Bytes that are read and then hashed, while the processor still has them at hand."""

_RANGE: Final = 1 << 25
"""Bytes of a file that a thread hashes before it takes others; a multiple of ``PART``."""

_MOST_THREADS: Final = 4
"""Together they hash as fast as most storage reads and writes."""

Each: TypeAlias = Callable[[Callable[[memoryview], bytes], Iterable[memoryview]], Iterable[bytes]]
"""``map``, or that of a pool of threads."""

_LOADING: Final = threading.Lock()
"""Held by the thread that loads the compiled function: loaded by two at once, it may fail."""

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class FileDigest:
    """What the manifest knows of a file.

    Attributes:
        size: in bytes.
        sha256: hexadecimal.
        part: bytes that have a digest each, of which ``sha256`` is the digest; 0: it is that of the
            content, as older programs wrote it.
    """

    size: int
    sha256: str
    part: int = 0


class RunningDigest:
    """The digest of bytes that come one after the other.

    Attributes:
        size: bytes so far.
    """

    def __init__(self) -> None:
        self.size = 0
        self._of_parts = hashlib.sha256()
        self._begun = hashlib.sha256()

    def update(self, content: memoryview, threads: int = 1, each: Each = map) -> None:
        """Go on with more bytes.

        Args:
            content: the bytes.
            threads: pieces into which it is cut.
            each: applies a function to every one of them.
        """
        missing = -self.size % PART
        self.size += len(content)
        self._begun.update(content[:missing])
        if 0 < missing <= len(content):
            self._end_part()
        content = content[missing:]
        end = len(content) // PART * PART
        for digests in each(hash_parts, _cut(content[:end], threads)):
            self._of_parts.update(digests)
        self._begun.update(content[end:])

    def _end_part(self) -> None:
        self._of_parts.update(self._begun.digest())
        self._begun = hashlib.sha256()

    @property
    def digest(self) -> FileDigest:
        """Size and digest of what came so far."""
        of_parts = self._of_parts.copy()
        if self.size % PART:
            of_parts.update(self._begun.digest())
        return FileDigest(self.size, of_parts.hexdigest(), PART)


def digest_of(path: Path, part: int = PART, threads: int = 1) -> FileDigest:
    """Read a file and return its digest.

    Args:
        path: of the file.
        part: ``PART``, or 0 for the digest of the whole content.
        threads: that read and hash.

    Raises:
        OSError: it cannot be read.
    """
    size = path.stat().st_size
    if not part:
        return FileDigest(size, _whole(path))
    of_parts = hashlib.sha256()
    with ThreadPoolExecutor(threads, thread_name_prefix="digest") as pool:
        for digests in pool.map(functools.partial(_of_range, path), range(0, size, _RANGE)):
            of_parts.update(digests)
    return FileDigest(size, of_parts.hexdigest(), part)


def hash_parts(content: memoryview) -> bytes:
    """Return the SHA-256 of every part, one after the other; the last part may be shorter."""
    library, found = _library(), b""
    if library is not None:
        together = PART * library.LANES
        end = len(content) // together * together
        found = library.digests(content[:end], PART)
        content = content[end:]
    parts = range(0, len(content), PART)
    return found + b"".join(hashlib.sha256(content[at : at + PART]).digest() for at in parts)


def threads_of_rank(environment: Mapping[str, str] = os.environ) -> int:
    """Return how many threads may form digests on this rank beside those of its neighbours."""
    ranks = int(environment.get("LOCAL_WORLD_SIZE") or "1")
    return min(_MOST_THREADS, max(1, _cores() // ranks))


def _cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _library() -> ModuleType | None:
    """Return the compiled function; ``None`` if hashlib is as fast, or there is no compiler."""
    with _LOADING:
        return _loaded()


@functools.cache
def _loaded() -> ModuleType | None:
    try:
        library = load_extension(PART_DIGESTS, cache_root())
    except LOAD_ERRORS as error:
        _LOG.info("digests are formed by hashlib, slower but the same: %s", reason(error))
        return None
    return library if library.LANES > 1 else None


def _cut(content: memoryview, pieces: int) -> list[memoryview]:
    """Return at most so many pieces of whole parts; each but the last has the same number."""
    step = max(PART, -(-len(content) // (pieces * _AT_ONCE)) * _AT_ONCE)
    return [content[at : at + step] for at in range(0, len(content), step)]


def _of_range(path: Path, begin: int) -> bytes:
    """Return the digests of the parts of a file from ``begin`` on."""
    found = []
    with path.open("rb", buffering=0) as file:
        file.seek(begin)
        memory = memoryview(bytearray(_AT_ONCE))
        for _ in range(_RANGE // _AT_ONCE):
            found.append(hash_parts(memory[: _filled(file, memory)]))
    return b"".join(found)


def _filled(file: io.RawIOBase, memory: memoryview) -> int:
    """Read until the memory is full or the file ends; return how many bytes were read."""
    count = 0
    while count < len(memory) and (more := file.readinto(memory[count:])):
        count += more
    return count


def _whole(path: Path) -> str:
    """Return the digest of a file's content."""
    with path.open("rb", buffering=0) as file:
        memory, sha256 = memoryview(bytearray(_AT_ONCE)), hashlib.sha256()
        while count := _filled(file, memory):
            sha256.update(memory[:count])
    return sha256.hexdigest()
