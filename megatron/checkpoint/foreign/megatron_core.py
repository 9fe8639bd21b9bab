"""Reads checkpoints of Megatron-Core in its format ``torch_dist``: its tensors and its arguments.

"Our" tensors belong to this program, "their" tensors to Megatron-Core. Both have Megatron's names.
Three things may differ in their tensors. Layers may be stacked: they then share a tensor whose
first dimension counts the layers. Norms may be part of the linear layer behind them, as in
Transformer Engine. The vocabulary is padded.

All other values are in ``common.pt``, an archive with a pickle that may ask for any class. The
pickle is read here and not by ``torch.load``, which would execute an archive of TorchScript.
Unknown classes are replaced by a class that does nothing, and no code is executed.
"""

import argparse
import io
import zipfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from megatron.checkpoint import folder
from megatron.checkpoint.boxed import StreamedTensor
from megatron.checkpoint.foreign.core_reader import CoreReader, CoreTensor, Inert
from megatron.checkpoint.foreign.core_rest import check_rest
from megatron.checkpoint.foreign.layouts import ForeignError, tensor_shapes, without_number
from megatron.checkpoint.foreign.weights import Advance, check_finite, write_weights
from megatron.checkpoint.metadata import METADATA, unpickled
from megatron.checkpoint.train_tensors import WEIGHT
from megatron.model.ownership import LAYERS, OUTPUT_LAYER, WORD_EMBEDDINGS
from megatron.model.settings import ModelSettings
from megatron.native.files import read_bytes
from megatron.parallel.box import Box, Shape

COMMON: Final = "common.pt"

_PICKLE: Final = "data.pkl"
_LARGEST_PICKLE: Final = 1 << 28
"""Bytes; a pickle of arguments has a few thousand, with a small optimizer some millions."""

_LARGEST_COMMON: Final = 1 << 29
"""Bytes of the largest file of arguments; its table of contents alone could fill all memory."""

_KNOWN: Final = {"argparse": {"Namespace"}, "collections": {"OrderedDict"}}
"""Harmless classes of which arguments consist."""

_FUSED_NORMS: Final = {
    "input_layernorm": "self_attention.linear_qkv.layer_norm",
    "pre_mlp_layernorm": "mlp.linear_fc1.layer_norm",
}
"""Norms that Transformer Engine makes part of the linear layer behind them, and their names."""


def find(path: Path) -> Path:
    """Return ``path`` if it is a checkpoint, or else the last checkpoint in the folder ``path``.

    Raises:
        ForeignError: there is no checkpoint.
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
    """Return the arguments of the run that saved a checkpoint; ``None``: they were not saved.

    Raises:
        ForeignError: the arguments cannot be read.
    """
    path = where / COMMON
    if not path.is_file():
        return None
    try:
        found = _read_common(path).get("args")
    except Exception as error:  # damaged pickles raise any exception
        raise ForeignError(f"{path} cannot be read ({error})") from error
    return found if isinstance(found, argparse.Namespace) else None


def _read_common(path: Path) -> dict[str, Any]:
    """Return the content of an archive of ``torch.save``, with empty objects for its tensors.

    Raises:
        ForeignError: the archive holds code, or no pickle of a usual size.
    """
    with zipfile.ZipFile(io.BytesIO(read_bytes(path, _LARGEST_COMMON))) as archive:
        entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        if "constants.pkl" in entries or any(name.startswith("code/") for name in entries):
            raise ForeignError("it is an archive of TorchScript, which holds code")
        pickled = entries.get(_PICKLE)
        if pickled is None or pickled.file_size > _LARGEST_PICKLE:
            raise ForeignError(f"it has no {_PICKLE} of at most {_LARGEST_PICKLE:,} bytes")
        content = unpickled(archive.read(pickled), _KNOWN, Inert)
    if not isinstance(content, dict):
        raise ForeignError("it holds no dictionary")
    return content


def locate(reader: CoreReader, model: ModelSettings) -> dict[str, CoreTensor]:
    """Return where every tensor of a model lies, by our names.

    Raises:
        ForeignError: a tensor is missing, or has another shape; or the model has no use for a
            tensor of the checkpoint.
    """
    found = {name: _locate(reader, name, shape) for name, shape in tensor_shapes(model).items()}
    check_rest(reader, found, model)
    return found


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
    """Return whether a box has the shape ``shape``, apart from leading dimensions of size 1."""
    return (
        box.shape[len(box.shape) - len(shape) :] == shape and box.size == torch.Size(shape).numel()
    )


def _names(name: str) -> Iterator[tuple[str, int | None]]:
    """Yield their possible names of one of our tensors, and its place in stacked layers."""
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
    model: ModelSettings,
    root: Path,
    advance: Advance,
    *,
    not_finite: bool = False,
) -> Path:
    """Write a checkpoint of iteration 0 with the weights of a checkpoint of Megatron-Core.

    Args:
        reader: reader of their checkpoint.
        found: where our tensors lie in their checkpoint.
        model: configuration of the model.
        root: folder of our checkpoints.
        advance: called with the number of bytes that were read since its last call.
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
