"""Arrays on disk that can be made again: what is there is as it was written, or is not used.

    STEM-documents.npy STEM-samples.npy STEM-shuffle.npy    the arrays
    STEM-checksums.json                                     size and CRC-32 of each; written last

Half-written files, full disks and failing ones, and copies that were cut short leave arrays that
NumPy reads without a word. A checksum against accidents is enough, as nothing in them is executed.
"""

import json
import logging
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.native.files import atomic_path, write_text

NAMES = ("documents", "samples", "shuffle")

_LOG = logging.getLogger(__name__)
_DAMAGED = "%s %s: the sample indices are built anew"
_CHUNK = 1 << 22  # bytes that are read at once


class IndexCache:
    """The arrays of one stem in a folder.

    Args:
        folder: made when something is written.
        stem: of the files' names; it must say everything that the arrays depend on.
    """

    def __init__(self, folder: Path, stem: str) -> None:
        self._paths = {name: folder / f"{stem}-{name}.npy" for name in NAMES}
        self._checksums = folder / f"{stem}-checksums.json"

    def load(self) -> dict[str, NDArray[Any]] | None:
        """Return the arrays by name, mapped and not read, if they are as they were written.

        Returns:
            ``None`` if they are not all there, or damaged; the log then names the file.
        """
        try:
            expected = json.loads(self._checksums.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return None  # never finished, or of a version without checksums
        except (OSError, ValueError, RecursionError) as error:
            _LOG.warning(_DAMAGED, self._checksums, f"cannot be read ({error})")
            return None
        found = {}
        for name, path in self._paths.items():
            try:
                if checksum(path) != expected[name]:
                    _LOG.warning(_DAMAGED, path, "is not what was written")
                    return None
                found[name] = _mapped(path)
            except (OSError, EOFError, KeyError, TypeError, ValueError) as error:
                _LOG.warning(_DAMAGED, path, f"cannot be read ({error})")
                return None
        return found

    def save(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Write the arrays, and that they are complete; return them mapped, as ``load`` does.

        Raises:
            OSError: they cannot be written.
        """
        self._checksums.parent.mkdir(parents=True, exist_ok=True)
        checksums = {}
        for name, path in self._paths.items():
            with atomic_path(path) as temporary:
                with temporary.open("wb") as file:
                    np.save(file, arrays[name])
                checksums[name] = checksum(temporary)
        write_text(self._checksums, json.dumps(checksums) + "\n")
        return {name: _mapped(path) for name, path in self._paths.items()}


def _mapped(path: Path) -> NDArray[Any]:
    return np.asarray(np.load(path, mmap_mode="r"))


def checksum(path: Path) -> list[int]:
    """Return the size of a file in bytes, and the CRC-32 of its content.

    Raises:
        OSError: it cannot be read.
    """
    crc, size = 0, os.path.getsize(path)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    return [size, crc]
