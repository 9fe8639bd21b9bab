"""Digests of files, which show whether a file of a checkpoint is as it was written.

A digest is the BLAKE3 hash of a file's content. Older versions of this program wrote SHA-256
hashes; they are computed here only to verify such checkpoints.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from blake3 import blake3

from megatron.native.files import open_file
from megatron.parallel.environment import cores_of_rank

PART: Final = 1 << 16
"""Bytes per part of a file whose digest is the SHA-256 of the SHA-256 hashes of its parts."""

_AT_ONCE: Final = 1 << 22
"""Bytes that are read and then hashed: few enough for a processor's cache, and enough for several
threads."""

_MOST_THREADS: Final = 4
"""Threads that hash together; this many are as fast as most storage."""


@dataclass(frozen=True)
class FileDigest:
    """Size and digest of a file in a manifest (the list of a checkpoint's files).

    Attributes:
        size: size in bytes.
        blake3: BLAKE3 hash in hexadecimal.
    """

    size: int
    blake3: str

    def fits(self, path: Path, threads: int = 1) -> bool:
        """Read a file and return whether it has this size and digest.

        Args:
            path: path of the file.
            threads: number of threads that hash.

        Raises:
            OSError: the file cannot be read.
        """
        return digest_of(path, threads) == self


@dataclass(frozen=True)
class OlderDigest:
    """Size and digest of a file in a manifest of format 1 or 2.

    Attributes:
        size: size in bytes.
        sha256: SHA-256 hash in hexadecimal.
        part: bytes per part; ``sha256`` is the hash of the parts' hashes, laid end to end. 0:
            ``sha256`` is the hash of the content.
    """

    size: int
    sha256: str
    part: int = 0

    def fits(self, path: Path, _: int = 1) -> bool:
        """Do the work of ``FileDigest.fits`` on this thread alone."""
        size, sha256 = 0, hashlib.sha256()
        for piece in _pieces(path, self.part or _AT_ONCE):
            size += len(piece)
            sha256.update(hashlib.sha256(piece).digest() if self.part else piece)
        return (size, sha256.hexdigest()) == (self.size, self.sha256)


Digest: TypeAlias = FileDigest | OlderDigest


class RunningDigest:
    """The digest of bytes that come one after the other.

    Args:
        threads: number of threads that hash.

    Attributes:
        size: number of bytes so far.
    """

    def __init__(self, threads: int = 1) -> None:
        self.size = 0
        self._hasher = blake3(max_threads=threads)

    def update(self, content: memoryview) -> None:
        """Hash more bytes; other Python threads run while a large piece is hashed."""
        self._hasher.update(content)
        self.size += len(content)

    @property
    def digest(self) -> FileDigest:
        """Size and digest of the bytes so far."""
        return FileDigest(self.size, self._hasher.hexdigest())


def digest_of(path: Path, threads: int = 1) -> FileDigest:
    """Read a file and return its digest; arguments and errors as ``FileDigest.fits``."""
    running = RunningDigest(threads)
    for piece in _pieces(path, _AT_ONCE):
        running.update(piece)
    return running.digest


def threads_of_rank(environment: Mapping[str, str] = os.environ) -> int:
    """Return how many threads may hash on this rank, if all ranks of its machine hash at once."""
    return min(_MOST_THREADS, cores_of_rank(environment))


def _pieces(path: Path, size: int) -> Iterator[memoryview]:
    """Yield the content of a file in pieces of ``size`` bytes, each valid until the next piece.

    The file is not mapped: if somebody shortened a mapped file, a signal would end the process.
    """
    memory = memoryview(bytearray(size))
    with open_file(path) as file:
        while count := file.readinto(memory):
            yield memory[:count]
