"""Reads which tensors a checkpoint holds, and where, without executing code from the file.

PyTorch keeps this metadata in ``.metadata``, a pickle. The digest shows that the file is as it was
written, but not who wrote it. So unpickling makes only objects of the classes that describe
tensors. The metadata is also compared with the manifest: PyTorch would read files that nobody has
checked, and would silently skip parts of a tensor that no file holds.
"""

import io
import pickle
import pickletools
from collections.abc import Collection, Mapping
from math import prod
from pathlib import Path
from typing import IO, Any, Final

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)

from megatron.checkpoint import folder
from megatron.checkpoint.digests import Digest
from megatron.checkpoint.folder import DamagedError
from megatron.native.files import read_bytes

METADATA: Final = ".metadata"
LARGEST: Final = 1 << 33
"""Bytes of the largest metadata that is read: it has room for 50 million parts of tensors."""

CLASSES: Final = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath"},
    "collections": {"OrderedDict"},
}
"""Classes that a ``.metadata`` may contain, besides the dtypes of tensors."""


def read_metadata(where: Path) -> Metadata:
    """Return the metadata of a checkpoint, if it agrees with the manifest.

    The files must have been compared with the manifest before.

    Args:
        where: folder of the checkpoint.

    Raises:
        DamagedError: ``.metadata`` cannot be read, or contradicts the manifest; the message names
            the file.
    """
    files, path = folder.read_manifest(where), where / METADATA
    if METADATA not in files:
        raise DamagedError(
            f"{where / folder.MANIFEST} does not list {METADATA}, so that nobody has checked it"
        )
    try:
        metadata = unpickled(read_bytes(path, LARGEST, is_told=True))
        for name, saved in metadata.state_dict_metadata.items():
            if isinstance(saved, TensorStorageMetadata):
                _check(name, saved, metadata.storage_data, files)
    except DamagedError as error:
        raise DamagedError(f"{path}: {error}") from error
    except Exception as error:  # damaged pickles raise any exception
        raise DamagedError(f"{path} cannot be read ({error})") from error
    assert isinstance(metadata, Metadata)
    return metadata


def unpickled(
    content: bytes, known: Mapping[str, Collection[str]] = CLASSES, other: type | None = None
) -> Any:
    """Return the content of a pickle that contains only known classes.

    A damaged file may raise any exception.

    Args:
        content: the pickle.
        known: names of the known classes by module; the dtypes of tensors are known as well.
        other: class that replaces every other class and the storages of tensors, and does nothing;
            ``None``: an unknown class raises ``DamagedError``.
    """
    check_numbers(content)
    return _Unpickler(io.BytesIO(content), known, other).load()


def check_numbers(pickled: bytes) -> None:
    """Check that the object numbers (memo indices) in a pickle fit its size.

    An object with number 10^9 takes memory for all numbers below it, even in a small file.

    Raises:
        DamagedError: a number is larger than the pickle has bytes.
        ValueError: the bytes are not a pickle.
    """
    for opcode, number, _ in pickletools.genops(pickled):
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(number or 0) > len(pickled):
            raise DamagedError(f"it has {len(pickled)} bytes and an object with number {number}")


class CheckedReader(dcp.FileSystemReader):
    """PyTorch's reader of a folder, which reads metadata with ``read_metadata`` of this file."""

    def __init__(self, where: Path) -> None:
        super().__init__(where)
        self._where = where

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return the metadata of the checkpoint; see ``read_metadata`` of this file."""
        metadata = read_metadata(self._where)
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Unpickler(pickle.Unpickler):
    """Makes objects of known classes only, so that no file can execute code."""

    def __init__(
        self, file: IO[bytes], known: Mapping[str, Collection[str]], other: type | None
    ) -> None:
        super().__init__(file)
        self._known, self._other = known, other

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if name in self._known.get(module, ()):
            return super().find_class(module, name)
        if self._other is not None:
            return self._other
        raise DamagedError(f"it asks for {module}.{name}, which no checkpoint has")

    def persistent_load(self, _: Any) -> Any:
        """Return a replacement for the storage of a tensor, which nobody reads here."""
        if self._other is not None:
            return self._other()
        raise DamagedError("it asks for the storage of a tensor, which no checkpoint has there")


def _check(
    name: str,
    saved: TensorStorageMetadata,
    places: dict[MetadataIndex, Any],
    files: dict[str, Digest],
) -> None:
    """Check that all parts of a tensor exist, in files that the manifest lists.

    Raises:
        DamagedError: a part is missing, or lies elsewhere.
    """
    elements = 0
    for chunk in saved.chunks:
        ends = [start + size for start, size in zip(chunk.offsets, chunk.sizes, strict=True)]
        if any(end > size for end, size in zip(ends, saved.size, strict=True)):
            raise DamagedError(f"a part of {name} ends at {ends}, outside of {list(saved.size)}")
        elements += prod(chunk.sizes)
        place = places[MetadataIndex(name, chunk.offsets)]
        listed = files.get(place.relative_path)
        if listed is None or not 0 <= place.offset <= place.offset + place.length <= listed.size:
            raise DamagedError(
                f"a part of {name} is in bytes {place.offset} to {place.offset + place.length} of "
                f"{place.relative_path}, which the manifest does not know"
            )
    if elements != prod(saved.size):
        raise DamagedError(
            f"the parts of {name} have {elements} elements, and the tensor {prod(saved.size)}"
        )
