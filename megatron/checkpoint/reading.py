"""Reads tensors of a checkpoint straight into the memory where they belong.

PyTorch's reader makes a new tensor of each part of a file with ``torch.load`` and copies from it.
Most of its time goes into memory that is used once. In the file, the rows of a part lie one after
the other in plain bytes. Here a rank reads only the rows that it needs, if possible straight into
the target tensor.
"""

from collections import defaultdict
from collections.abc import Mapping
from io import BufferedReader
from math import prod
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from megatron.checkpoint.boxed import BoxedTensor
from megatron.checkpoint.metadata import CheckedReader
from megatron.native.files import open_file
from megatron.parallel.box import Box, Shape

_RECORD = "data/0"
"""Record that holds the bytes of a tensor in an archive of ``torch.save``."""


def read_boxes(
    tensors: Mapping[str, BoxedTensor], reader: dcp.StorageReader, metadata: Metadata
) -> None:
    """Fill tensors of this rank from a checkpoint, without communication with other ranks.

    Args:
        tensors: tensors by name in the whole model; the checkpoint has all of them.
        reader: reader of the checkpoint.
        metadata: metadata of the checkpoint.
    """
    planner = dcp.DefaultLoadPlanner()
    planner.set_up_planner(dict(tensors), metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    reader.read_data(planner.finish_plan(plan), planner).wait()


class TensorReader(CheckedReader):
    """PyTorch's reader of checkpoints, for tensors that ``BoxedTensor`` has written.

    Args:
        path: folder of the checkpoint.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._metadata: Metadata = self.read_metadata()

    @property
    def metadata(self) -> Metadata:
        """Metadata of the checkpoint: shapes, dtypes and parts of all tensors."""
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the planned parts into their tensors.

        Raises:
            ValueError: a part has another size than planned, or its file ends too early.
        """
        by_file: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            by_file[self.storage_data[item.storage_index].relative_path].append(item)
        for name, items in by_file.items():
            with open_file(Path(self.path) / name) as file:
                for item in sorted(items, key=self._place):
                    target = planner.resolve_tensor(item).detach()
                    self._read(file, item, target)
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _place(self, item: ReadItem) -> int:
        """Return where the part of an item begins in its file."""
        return int(self.storage_data[item.storage_index].offset)

    def _read(self, file: BufferedReader, item: ReadItem, target: Tensor) -> None:
        """Fill ``target`` with the box that ``item`` asks for, out of a part of a file."""
        index = item.storage_index
        known = self._metadata.state_dict_metadata[index.fqn]
        assert isinstance(known, TensorStorageMetadata)
        shape, dtype = _shape_of_part(known, index), known.properties.dtype
        box = Box(tuple(item.storage_offsets) or (0,), tuple(item.lengths) or (1,))
        rows = Box((box.start[0], *(0 for _ in shape[1:])), (box.shape[0], *shape[1:]))
        row = prod(shape[1:]) * dtype.itemsize
        file.seek(self._bytes_of(file, item, shape[0] * row) + box.start[0] * row)
        in_place = (
            rows == box and target.dtype == dtype and target.is_cpu and target.is_contiguous()
        )
        memory = target if in_place else torch.empty(rows.shape, dtype=dtype)
        _fill(file, memory)
        if not in_place:
            target.copy_(memory[box.within(rows).slices].reshape(target.shape))

    def _bytes_of(self, file: BufferedReader, item: ReadItem, size: int) -> int:
        """Return where the bytes of a part begin in its file."""
        stored = self.storage_data[item.storage_index]
        archive = torch._C.PyTorchFileReader(self._slice_file(file, stored))
        if _size_of_record(archive) != size:
            raise ValueError(f"{file.name}: {item.storage_index.fqn} has another size there")
        begin = archive.get_record_offset(_RECORD)  # type: ignore[attr-defined] # not in its stub
        return int(stored.offset + begin)


def _size_of_record(archive: torch._C.PyTorchFileReader) -> int:
    """Return the bytes of the only record; PyTorch 2.11 must read the record for that."""
    if hasattr(archive, "get_record_size"):
        return int(archive.get_record_size(_RECORD))
    return len(archive.get_record(_RECORD))


def _shape_of_part(known: TensorStorageMetadata, index: MetadataIndex) -> Shape:
    """Return the shape of a part of a tensor; a tensor without dimensions has one row."""
    found = (chunk.sizes for chunk in known.chunks if chunk.offsets == index.offset)
    return tuple(next(found)) or (1,)


def _fill(file: BufferedReader, memory: Tensor) -> None:
    left = memory.reshape(-1).view(torch.uint8).numpy().data
    while left:
        count = file.readinto(left)
        if not count:
            raise ValueError(f"{file.name} ends before it should")
        left = left[count:]
