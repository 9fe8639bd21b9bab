"""A folder of safetensors files: read tensor by tensor, written file by file.

At most the tensors of one file are in memory at a time.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from megatron.checkpoint.foreign.layouts import ForeignError
from megatron.data.tokenizers.files import library
from megatron.native.files import open_file, read_bytes, sync, temporary_name
from megatron.parallel.box import Shape

ONE_FILE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"

_TYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


@dataclass(frozen=True)
class StoredTensor:
    """Place, shape and dtype of a tensor in a file.

    Attributes:
        file: file that holds the tensor.
        shape: shape of the tensor.
        dtype: dtype of its elements.
    """

    file: Path
    shape: Shape
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Bytes of the tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class TensorFiles:
    """The tensors in the safetensors files of a folder.

    Args:
        folder: folder with one safetensors file, or with several files and their index.

    Attributes:
        tensors: file, shape and dtype of every tensor, by name.

    Raises:
        ForeignError: a file is missing or damaged, or has elements that are not floating-point; or
            the folder has two tensors of one name.
    """

    def __init__(self, folder: Path) -> None:
        self.tensors: dict[str, StoredTensor] = {}
        self._open: tuple[Path, Any] | None = None
        for path, wanted in _files(folder).items():
            found = dict(_described(path))
            if missing := sorted(wanted - found.keys()):
                raise ForeignError(
                    f"{path} has no tensor {missing[0]}, which the index places there"
                )
            if twice := sorted(found.keys() & self.tensors.keys()):
                raise ForeignError(
                    f"{path} and {self.tensors[twice[0]].file} both have a tensor {twice[0]}: "
                    "remove the one that is not the model's"
                )
            self.tensors |= found

    def read(self, name: str) -> Tensor:
        """Return a tensor.

        Raises:
            ForeignError: the tensor cannot be read.
        """
        path = self.tensors[name].file
        with _told(path):
            if self._open is None or self._open[0] != path:
                self._open = path, _safe_open(path)
            tensor: Tensor = self._open[1].get_tensor(name)
        return tensor


def _files(folder: Path) -> dict[Path, set[str]]:
    """Return the files of a folder, each with the tensors that the index places in it."""
    index = folder / INDEX
    if not index.exists():
        return {_only_file(folder): set()}
    try:
        placed = json.loads(read_bytes(index))["weight_map"]
        files: dict[Path, set[str]] = {}
        for name, file in placed.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise ValueError(f"{str(file)[:40]!r} is no file of this folder")
            files.setdefault(folder / file, set()).add(name)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ForeignError(f"{index} cannot be read ({error})") from error
    if not files:
        raise ForeignError(f"{index} lists no tensors")
    whole = folder / ONE_FILE
    if whole not in files and whole.exists():
        raise ForeignError(
            f"{folder} has {ONE_FILE} and an index of other files: remove the one that is not the "
            "model's"
        )
    return files


def _only_file(folder: Path) -> Path:
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    if found:
        raise ForeignError(f"{folder} has {len(found)} safetensors files, but no {INDEX}")
    others = sorted(path.name for path in folder.glob("*.bin"))
    if others:
        raise ForeignError(
            f"{folder} has {others[0]} but no safetensors files: a .bin file may run anything when "
            "it is read, so save the model with transformers' save_pretrained, or take its "
            "safetensors from the hub"
        )
    raise ForeignError(f"{folder} has no safetensors files")


def _described(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    with _told(path):
        file = _safe_open(path)
        for name in file.keys():  # noqa: SIM118 (the file is not a mapping)
            described = file.get_slice(name)
            kind = described.get_dtype()
            if kind not in _TYPES:
                raise ForeignError(
                    f"{path}: {name} has elements of type {kind}; weights are converted from "
                    f"{', '.join(_TYPES)}"
                )
            yield name, StoredTensor(path, tuple(described.get_shape()), _TYPES[kind])


def _safe_open(path: Path) -> Any:
    open_file(path).close()  # refuses a pipe, which the package would wait for, and a device
    return _of_safetensors("safetensors").safe_open(path, framework="pt")


def _of_safetensors(module: str) -> Any:
    """Return a module of the package safetensors.

    Raises:
        ForeignError: the package is not installed.
    """
    try:
        return library(module, "a file of tensors")
    except ValueError as error:
        raise ForeignError(str(error)) from error


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Turn every error about a file into a ``ForeignError`` that names the file."""
    try:
        yield
    except (ForeignError, ImportError):
        raise
    except Exception as error:  # safetensors has errors of its own
        raise ForeignError(f"{path} cannot be read ({error})") from error


@dataclass(frozen=True)
class Group:
    """Tensors that are made together and written to one file.

    Attributes:
        sizes: bytes of every tensor, by name.
        make: returns the tensors, by name.
    """

    sizes: Mapping[str, int]
    make: Callable[[], Mapping[str, Tensor]]

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(self.sizes.values())


def write_folder(
    folder: Path, groups: Iterable[Group], texts: Mapping[str, str], most_bytes: int
) -> None:
    """Write the files of a model; the folder is complete or absent.

    Args:
        folder: folder to make; it may exist if it is empty.
        groups: groups of tensors, in the order in which they are written.
        texts: texts of other files, by name.
        most_bytes: most bytes of a file of tensors; only a file of one larger group has more.

    Raises:
        ForeignError: the folder is not empty, or cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ForeignError(f"{folder} is there already: name another folder, or remove it")
    partial = temporary_name(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
        index = _write_tensors(partial, _shards(groups, most_bytes))
        for name, text in {**texts, **index}.items():
            (partial / name).write_text(text, encoding="utf-8")
            sync(partial / name)
        partial.replace(folder)
    except OSError as error:
        raise ForeignError(f"{folder} was not written ({error})") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _shards(groups: Iterable[Group], most_bytes: int) -> list[list[Group]]:
    shards: list[list[Group]] = [[]]
    filled = 0
    for group in groups:
        if shards[-1] and filled + group.size > most_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(group)
        filled += group.size
    return shards


def _write_tensors(folder: Path, shards: Sequence[Sequence[Group]]) -> dict[str, str]:
    """Write the files of tensors; return the name and text of their index if there are several."""
    save_file = _of_safetensors("safetensors.torch").save_file
    placed: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards, 1):
        several = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        path = folder / (several if len(shards) > 1 else ONE_FILE)
        tensors = {name: tensor for group in shard for name, tensor in group.make().items()}
        save_file(tensors, path, metadata={"format": "pt"})
        sync(path)
        placed |= dict.fromkeys(tensors, path.name)
        total += sum(group.size for group in shard)
    if len(shards) == 1:
        return {}
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}
    return {INDEX: json.dumps(content, indent=2) + "\n"}
