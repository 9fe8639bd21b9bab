"""Reads tensors of a checkpoint of Megatron-Core; only descriptions of tensors are unpickled."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from megatron.checkpoint.boxed import BoxedTensor
from megatron.checkpoint.foreign.layouts import ForeignError
from megatron.checkpoint.foreign.weights import Advance
from megatron.checkpoint.metadata import METADATA, unpickled
from megatron.checkpoint.reading import read_boxes
from megatron.native.files import open_file, read_bytes
from megatron.parallel.box import Box, Piece, Shape


class Inert:
    """Replaces an object of an unknown class, and does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *_: Any, **__: Any) -> "Inert":
        """Return the object, as if it had made another one."""
        return self

    def __setstate__(self, _: Any) -> None:
        pass

    def __setitem__(self, _: Any, __: Any) -> None:
        pass

    def extend(self, _: Any) -> None:
        """Ignore the content of a list of an unknown class."""


@dataclass(frozen=True)
class CoreTensor:
    """Where one of our tensors lies within a tensor of Megatron-Core's checkpoint.

    Attributes:
        name: name of Megatron-Core's tensor.
        shape: shape of Megatron-Core's tensor.
        dtype: dtype of both tensors.
        box: part of Megatron-Core's tensor that becomes our tensor.
        ours: shape of our tensor.
    """

    name: str
    shape: Shape
    dtype: torch.dtype
    box: Box
    ours: Shape

    @property
    def size(self) -> int:
        """Bytes of our tensor."""
        return self.box.size * self.dtype.itemsize


class CoreReader(dcp.FileSystemReader):
    """PyTorch's reader of a folder, which unpickles only descriptions of tensors.

    Args:
        where: folder of the checkpoint.

    Attributes:
        known: metadata of the checkpoint.
        tensors: metadata of its tensors, by their names.

    Raises:
        ForeignError: the metadata cannot be read.
    """

    def __init__(self, where: Path) -> None:
        super().__init__(where)
        path = where / METADATA
        try:
            # Megatron-Core keeps plans of its saves here, too.
            self.known: Metadata = unpickled(read_bytes(path), other=Inert)
            for name in {place.relative_path for place in self.known.storage_data.values()}:
                if (where / name).exists():  # a missing file is told when it is read
                    open_file(where / name).close()
            self.tensors = {
                name: saved
                for name, saved in self.known.state_dict_metadata.items()
                if isinstance(saved, TensorStorageMetadata)
            }
        except Exception as error:  # damaged pickles raise any exception
            raise ForeignError(f"{path} cannot be read ({error})") from error
        self.known.storage_meta = self.known.storage_meta or StorageMeta()

    def read(self, found: CoreTensor, advance: Advance) -> Tensor:
        """Return one of our tensors, read from theirs.

        Raises:
            ForeignError: their tensor cannot be read.
        """
        part = torch.empty(found.box.shape, dtype=found.dtype)
        piece = Piece(found.box, (0,) * part.dim())
        try:
            read_boxes({found.name: BoxedTensor(part, found.shape, [piece])}, self, self.known)
        except Exception as error:  # damaged archives raise any exception
            raise ForeignError(f"{self.path}: {found.name} cannot be read ({error})") from error
        advance(found.size)
        return part.view(found.ours)
