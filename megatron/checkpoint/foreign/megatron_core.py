"""Checkpoints of Megatron-Core in its format ``torch_dist``: its tensors, and its arguments.

The tensors have our names, for theirs are Megatron's too. They may be stacked: layers then share a
tensor whose first dimension counts them. Norms may be part of the linear layer that they stand
before, as Transformer Engine has them. The vocabulary is padded there, and not here.

Everything that is no tensor is in ``common.pt``, an archive with a pickle that may ask for any
class. The pickle is read here and not by ``torch.load``, which runs archives of TorchScript.
Classes that are not known here become empty ones, and nothing is executed.
"""

import argparse
import io
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from megatron.checkpoint import folder
from megatron.checkpoint.boxed import BoxedTensor, StreamedTensor
from megatron.checkpoint.foreign.layouts import ForeignError, tensor_shapes, without_number
from megatron.checkpoint.foreign.weights import Advance, check_finite, write_weights
from megatron.checkpoint.metadata import METADATA, check_numbers, unpickled
from megatron.checkpoint.reading import read_boxes
from megatron.checkpoint.train_tensors import WEIGHT
from megatron.model.config import ModelConfig
from megatron.model.ownership import LAYERS, OUTPUT_LAYER, WORD_EMBEDDINGS
from megatron.parallel.box import Box, Piece, Shape

COMMON: Final = "common.pt"

_PICKLE: Final = "data.pkl"
_LARGEST_PICKLE: Final = 1 << 28
"""Bytes; a pickle of arguments has a few thousand, and one of a small optimizer some millions."""

_FUSED_NORMS: Final = {
    "input_layernorm": "self_attention.linear_qkv.layer_norm",
    "pre_mlp_layernorm": "mlp.linear_fc1.layer_norm",
}
"""Norms that Transformer Engine has in the linear layer behind them: ``layer_norm_weight``."""


def find(path: Path) -> Path:
    """Return the folder of the checkpoint that ``path`` is, or whose last one it has.

    Raises:
        ForeignError: there is none.
    """
    if (path / METADATA).is_file():
        return path
    last = folder.pointed_to(path)
    if last is not None and (folder.folder_of(path, last) / METADATA).is_file():
        return folder.folder_of(path, last)
    raise ForeignError(
        f"{path} has no {METADATA}: give the folder of one checkpoint of Megatron-Core in the "
        "format torch_dist (--ckpt-format torch_dist writes it)"
    )


def arguments(where: Path) -> argparse.Namespace | None:
    """Return the arguments of the run that saved a checkpoint; ``None`` if it does not tell.

    Raises:
        ForeignError: they cannot be read.
    """
    path = where / COMMON
    if not path.is_file():
        return None
    try:
        found = _read_common(path).get("args")
    except Exception as error:  # damaged pickles raise whatever they like
        raise ForeignError(f"{path} cannot be read ({error})") from error
    return found if isinstance(found, argparse.Namespace) else None


def _read_common(path: Path) -> dict[str, Any]:
    """Return the content of an archive that ``torch.save`` wrote, with inert tensors.

    Raises:
        ForeignError: it holds code, or no pickle of a usual size.
    """
    with zipfile.ZipFile(path) as archive:
        entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        if "constants.pkl" in entries or any(name.startswith("code/") for name in entries):
            raise ForeignError("it is an archive of TorchScript, which holds code")
        pickled = entries.get(_PICKLE)
        if pickled is None or pickled.file_size > _LARGEST_PICKLE:
            raise ForeignError(f"it has no {_PICKLE} of at most {_LARGEST_PICKLE:,} bytes")
        found = archive.read(pickled)
        check_numbers(found)
        content = _InertUnpickler(io.BytesIO(found)).load()
    if not isinstance(content, dict):
        raise ForeignError("it holds no dictionary")
    return content


class _Inert:
    """Stands for an object of a class that is not known here."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *_: Any, **__: Any) -> "_Inert":
        return self

    def __setstate__(self, _: Any) -> None:
        pass

    def __setitem__(self, _: Any, __: Any) -> None:
        pass

    def extend(self, _: Any) -> None:
        """Take what a list of another class holds, and forget it."""


class _InertUnpickler(pickle.Unpickler):
    """Makes known harmless objects, and empty ones in place of all others."""

    _KNOWN: Final = {
        ("argparse", "Namespace"),
        ("collections", "OrderedDict"),
    }

    def find_class(self, module: str, name: str) -> Any:
        kind = getattr(torch, name, None) if module == "torch" else None
        if isinstance(kind, torch.dtype):
            return kind
        return super().find_class(module, name) if (module, name) in self._KNOWN else _Inert

    def persistent_load(self, _: Any) -> _Inert:
        """Stand for the storage of a tensor, which nobody reads here."""
        return _Inert()


@dataclass(frozen=True)
class CoreTensor:
    """Where a tensor of ours is in theirs.

    Attributes:
        name: of their tensor.
        shape: of their tensor.
        dtype: of the elements.
        box: the part that is ours.
        ours: shape of ours.
    """

    name: str
    shape: Shape
    dtype: torch.dtype
    box: Box
    ours: Shape

    @property
    def size(self) -> int:
        """Bytes of ours."""
        return self.box.size * self.dtype.itemsize


class CoreReader(dcp.FileSystemReader):
    """PyTorch's reader of a folder, which makes nothing of it but what describes tensors.

    Args:
        where: folder of the checkpoint.

    Attributes:
        known: what the checkpoint holds.

    Raises:
        ForeignError: it cannot be read.
    """

    def __init__(self, where: Path) -> None:
        super().__init__(where)
        path = where / METADATA
        try:
            self.known: Metadata = unpickled(path, _Inert)  # it keeps its plans of saving there
            self.tensors = {
                name: saved
                for name, saved in self.known.state_dict_metadata.items()
                if isinstance(saved, TensorStorageMetadata)
            }
        except Exception as error:  # damaged pickles raise whatever they like
            raise ForeignError(f"{path} cannot be read ({error})") from error
        self.known.storage_meta = self.known.storage_meta or StorageMeta()

    def read(self, found: CoreTensor, advance: Advance) -> Tensor:
        """Return a tensor of ours.

        Raises:
            ForeignError: it cannot be read.
        """
        part = torch.empty(found.box.shape, dtype=found.dtype)
        piece = Piece(found.box, (0,) * part.dim())
        try:
            read_boxes({found.name: BoxedTensor(part, found.shape, [piece])}, self, self.known)
        except Exception as error:  # damaged archives raise whatever they like
            raise ForeignError(f"{self.path}: {found.name} cannot be read ({error})") from error
        advance(found.size)
        return part.view(found.ours)


def locate(reader: CoreReader, model: ModelConfig) -> dict[str, CoreTensor]:
    """Return where every tensor of a model is, by our names.

    Raises:
        ForeignError: one is missing, or has another shape.
    """
    return {name: _locate(reader, name, shape) for name, shape in tensor_shapes(model).items()}


def _locate(reader: CoreReader, name: str, shape: Shape) -> CoreTensor:
    for theirs, layer in _names(name):
        saved = reader.tensors.get(theirs)
        if saved is None:
            continue
        size, dtype = tuple(saved.size), saved.properties.dtype
        whole = Box.whole(shape)
        if layer is not None:
            box = Box((layer, *whole.start), (1, *shape))
        elif name in (WORD_EMBEDDINGS, OUTPUT_LAYER):
            box = whole  # the rows behind it are padding
        else:
            box = Box.whole(size)
        if len(box.shape) == len(size) and box & Box.whole(size) == box and _fits(box, shape):
            return CoreTensor(theirs, size, dtype, box, shape)
        raise ForeignError(
            f"{reader.path}: {theirs} has shape {list(size)}, and the model needs {list(shape)}"
            + (f" for its layer {layer}" if layer is not None else "")
        )
    raise ForeignError(f"{reader.path} has no tensor {name}, which the model needs")


def _fits(box: Box, shape: Shape) -> bool:
    """Return whether a box has as many elements in the same rows as a tensor."""
    return (
        box.shape[len(box.shape) - len(shape) :] == shape and box.size == torch.Size(shape).numel()
    )


def _names(name: str) -> Iterator[tuple[str, int | None]]:
    """Yield the names that a tensor of ours may have, and its place in stacked layers."""
    yield name, None
    key, number = without_number(name)
    if not number:
        return
    part = key.removeprefix(LAYERS)
    stacked = [part]
    norm, _, kind = part.partition(".")
    if norm in _FUSED_NORMS:
        fused = f"{_FUSED_NORMS[norm]}_{kind}"
        yield f"{LAYERS}{number}.{fused}", None
        stacked.append(fused)
    for theirs in stacked:
        yield LAYERS + theirs, int(number)


def import_core(
    reader: CoreReader,
    found: Mapping[str, CoreTensor],
    model: ModelConfig,
    root: Path,
    advance: Advance,
    *,
    not_finite: bool = False,
) -> Path:
    """Write a checkpoint of iteration 0 with the weights of one of Megatron-Core.

    Args:
        reader: of their checkpoint.
        found: where the tensors are.
        model: whose they are.
        root: folder of our checkpoints.
        advance: is told what was read.
        not_finite: whether weights may be NaN or infinite.

    Raises:
        ForeignError: a tensor cannot be read, or has elements that are not finite.
        SaveError: the checkpoint cannot be written.
    """

    def read(tensor: CoreTensor) -> Tensor:
        part = reader.read(tensor, advance)
        if not not_finite:
            check_finite(part, f"{reader.path}: {tensor.name}")
        return part

    streamed = {
        f"{WEIGHT}.{name}": StreamedTensor(tensor.ours, tensor.dtype, partial(read, tensor))
        for name, tensor in found.items()
    }
    return write_weights(root, model, streamed)
