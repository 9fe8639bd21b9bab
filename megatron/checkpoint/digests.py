"""Digests of files, which show whether a file of a checkpoint is as it was written.

A digest is the BLAKE3 of a file's content. Checkpoints of older programs have SHA-256, which is
formed here to verify those checkpoints and for nothing else.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from blake3 import blake3

PART: Final = 1 << 16
"""Bytes of a part of a file, where the digest is the SHA-256 of the SHA-256 of its parts."""

_AT_ONCE: Final = 1 << 22
"""Bytes that are read and then hashed: few enough to stay in a processor's cache meanwhile, and
enough for several threads."""

_MOST_THREADS: Final = 4
"""Together they hash as fast as most storage reads."""


@dataclass(frozen=True)
class FileDigest:
    """What a manifest knows of a file.

    Attributes:
        size: in bytes.
        blake3: hexadecimal.
    """

    size: int
    blake3: str

    def fits(self, path: Path, threads: int = 1) -> bool:
        """Read a file and return whether it has this size and digest.

        Args:
            path: of the file.
            threads: that hash.

        Raises:
            OSError: it cannot be read.
        """
        return digest_of(path, threads) == self


@dataclass(frozen=True)
class OlderDigest:
    """What a manifest before format 3 knows of a file.

    Attributes:
        size: in bytes.
        sha256: hexadecimal.
        part: bytes that have a SHA-256 each, which are laid end to end and hashed again; 0:
            ``sha256`` is that of the content.
    """

    size: int
    sha256: str
    part: int = 0

    def fits(self, path: Path, _: int = 1) -> bool:
        """As ``FileDigest.fits``, on this thread alone."""
        size, sha256 = 0, hashlib.sha256()
        for piece in _pieces(path, self.part or _AT_ONCE):
            size += len(piece)
            sha256.update(hashlib.sha256(piece).digest() if self.part else piece)
        return (size, sha256.hexdigest()) == (self.size, self.sha256)


Digest: TypeAlias = FileDigest | OlderDigest


class RunningDigest:
    """The digest of bytes that come one after the other.

    Args:
        threads: that hash.

    Attributes:
        size: bytes so far.
    """

    def __init__(self, threads: int = 1) -> None:
        self.size = 0
        self._hasher = blake3(max_threads=threads)

    def update(self, content: memoryview) -> None:
        """Go on with more bytes; Python's lock is free while many are hashed."""
        self._hasher.update(content)
        self.size += len(content)

    @property
    def digest(self) -> FileDigest:
        """Size and digest of what came so far."""
        return FileDigest(self.size, self._hasher.hexdigest())


def digest_of(path: Path, threads: int = 1) -> FileDigest:
    """Read a file and return its digest; arguments and errors as ``FileDigest.fits``."""
    running = RunningDigest(threads)
    for piece in _pieces(path, _AT_ONCE):
        running.update(piece)
    return running.digest


def threads_of_rank(environment: Mapping[str, str] = os.environ) -> int:
    """Return how many threads may form digests on this rank beside those of its neighbours."""
    ranks = int(environment.get("LOCAL_WORLD_SIZE") or "1")
    return min(_MOST_THREADS, max(1, _cores() // ranks))


def _cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _pieces(path: Path, size: int) -> Iterator[memoryview]:
    """Yield the content of a file in pieces of this size, each valid until the next one.

    Files are not mapped: if one were cut short meanwhile, a signal would end the process.
    """
    memory = memoryview(bytearray(size))
    with path.open("rb") as file:
        while count := file.readinto(memory):
            yield memory[:count]
