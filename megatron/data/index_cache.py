"""Cached arrays on disk: an array that is missing or damaged is not used, but built again.

    STEM-documents.npy STEM-samples.npy STEM-shuffle.npy    the arrays
    STEM-checksums.json                                     size and CRC-32 of each; written last

Killed writers, full or failing disks and incomplete copies leave damaged arrays that NumPy reads
without an error. A checksum against accidents is enough, because nothing in the arrays is executed.
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

from megatron.data.index_builder import IndexBuilder, name_bus_errors
from megatron.native.files import atomic_path, open_file, read_bytes, replace_text

NAMES = ("documents", "samples", "shuffle")

_LOG = logging.getLogger(__name__)
_DAMAGED = "%s %s: the sample indices are built anew"
_CHUNK = 1 << 22  # bytes that are read at once


class IndexCache:
    """The arrays of one stem in a folder.

    Args:
        folder: folder of the arrays, made by the first save.
        stem: beginning of the files' names; it must identify everything that the arrays depend on.
    """

    def __init__(self, folder: Path, stem: str) -> None:
        self._paths = {name: folder / f"{stem}-{name}.npy" for name in NAMES}
        self._checksums = folder / f"{stem}-checksums.json"

    def load(self) -> dict[str, NDArray[Any]] | None:
        """Return the arrays by name, mapped into memory, if their checksums are right.

        Returns:
            The arrays. ``None``: a file is missing or damaged; the log names a damaged file.
        """
        try:
            expected = json.loads(read_bytes(self._checksums))
        except (FileNotFoundError, NotADirectoryError):
            return None  # the save never finished, or an older version wrote no checksums
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
        """Write the arrays, then their checksums; return the arrays mapped, as ``load`` does.

        Raises:
            OSError: a file cannot be written.
        """
        self._checksums.parent.mkdir(parents=True, exist_ok=True)
        checksums = {}
        for name, path in self._paths.items():
            with atomic_path(path) as temporary:
                with temporary.open("wb") as file:
                    np.save(file, arrays[name])
                checksums[name] = checksum(temporary)
        replace_text(self._checksums, json.dumps(checksums) + "\n")
        return {name: _mapped(path) for name, path in self._paths.items()}

    def name_bus_errors(self, arrays: Mapping[str, NDArray[Any]], builder: IndexBuilder) -> None:
        """Let a message name the file, if this process dies because a file was cut short.

        ``arrays`` are those of ``load`` or ``save``.
        """
        for name, array in arrays.items():
            way_out = "go on from the last checkpoint (--load), and the file is built anew"
            name_bus_errors(builder, self._paths[name], [array], way_out)


def _mapped(path: Path) -> NDArray[Any]:
    return np.asarray(np.load(path, mmap_mode="r"))


def checksum(path: Path) -> list[int]:
    """Return the size of a file in bytes, and the CRC-32 of its content.

    Raises:
        OSError: the file cannot be read.
    """
    crc, size = 0, os.path.getsize(path)
    with open_file(path) as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    return [size, crc]
