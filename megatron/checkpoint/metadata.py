"""Which tensors a checkpoint holds, and where: read without executing anything.

PyTorch keeps it in ``.metadata``, a pickle. Its digest says that the file is as it was written, not
by whom; so nothing is made of it but the classes that describe tensors. What it says is compared
with the manifest: PyTorch would read files that nobody has checked, and leave parts of a tensor
unread for which it finds no file.
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

METADATA: Final = ".metadata"

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
"""What a ``.metadata`` may be made of, besides the types of tensors' elements."""


def read_metadata(where: Path) -> Metadata:
    """Return what a checkpoint's ``.metadata`` says, if it goes with the manifest.

    The files must have been compared with the manifest.

    Args:
        where: folder of the checkpoint.

    Raises:
        DamagedError: it cannot be read, or does not go with the manifest; names the file.
    """
    files, path = folder.read_manifest(where), where / METADATA
    if METADATA not in files:
        raise DamagedError(
            f"{where / folder.MANIFEST} does not list {METADATA}, so that nobody has checked it"
        )
    try:
        with path.open("rb") as file:
            metadata = unpickled(file)
        for name, saved in metadata.state_dict_metadata.items():
            if isinstance(saved, TensorStorageMetadata):
                _check(name, saved, metadata.storage_data, files)
    except DamagedError as error:
        raise DamagedError(f"{path}: {error}") from error
    except Exception as error:  # damaged pickles raise whatever they like
        raise DamagedError(f"{path} cannot be read ({error})") from error
    assert isinstance(metadata, Metadata)
    return metadata


def unpickled(
    file: IO[bytes], known: Mapping[str, Collection[str]] = CLASSES, other: type | None = None
) -> Any:
    """Return the content of a pickle, if it is made of the known classes only.

    Damaged files raise whatever they like.

    Args:
        file: is read.
        known: names of classes by their modules, besides the types of tensors' elements.
        other: stands for every other class, and for the storages of tensors, and must do nothing;
            ``None``: there may be none.
    """
    if other is not None:  # of strangers, and nobody has noted its digest
        content = file.read()
        check_numbers(content)
        file = io.BytesIO(content)
    return _Unpickler(file, known, other).load()


def check_numbers(pickled: bytes) -> None:
    """Check that a pickle numbers its objects as one does that was written from objects.

    An object with number 10^9 takes memory for all numbers below it, however small the file.

    Raises:
        DamagedError: it does not.
        ValueError: it is no pickle.
    """
    for opcode, number, _ in pickletools.genops(pickled):
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(number or 0) > len(pickled):
            raise DamagedError(f"it has {len(pickled)} bytes and an object with number {number}")


class CheckedReader(dcp.FileSystemReader):
    """PyTorch's reader of a folder, which reads metadata by this file's ``read_metadata``."""

    def __init__(self, where: Path) -> None:
        super().__init__(where)
        self._where = where

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return what the checkpoint holds; see ``read_metadata``."""
        metadata = read_metadata(self._where)
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Unpickler(pickle.Unpickler):
    """Makes objects of the known classes only, so that no file can have anything executed."""

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
        """Stand for the storage of a tensor, which nobody reads here."""
        if self._other is not None:
            return self._other()
        raise DamagedError("it asks for the storage of a tensor, which no checkpoint has there")


def _check(
    name: str,
    saved: TensorStorageMetadata,
    places: dict[MetadataIndex, Any],
    files: dict[str, Digest],
) -> None:
    """Check that the parts of a tensor are all there, in files that the manifest lists.

    Raises:
        DamagedError: they are not.
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
