"""A rank's part of a tensor of the whole model, as PyTorch's distributed checkpoints understand it.

``torch.distributed.checkpoint`` asks a tensor for its parts by three methods: what to write, what
to read, and the memory of one part. Its planner then finds out by itself which parts of which files
a rank needs, whatever layout has written them. Parts that several ranks hold are written once.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from megatron.parallel.box import Box, Piece, Shape


class BoxedTensor(Tensor):
    """The pieces of a tensor of the whole model that lie in one tensor of this rank.

    It shares its memory with that tensor, and has the size of the whole model's.

    Args:
        tensor: of this rank.
        global_shape: of the whole model's tensor.
        pieces: which boxes are here, and where.
    """

    _global_shape: Shape
    _pieces: tuple[Piece, ...]

    def __new__(cls, tensor: Tensor, global_shape: Shape, pieces: Iterable[Piece]) -> "BoxedTensor":
        """Wrap ``tensor``; see the class."""
        made = Tensor._make_subclass(cls, tensor.detach())
        made._global_shape = tuple(global_shape)
        made._pieces = tuple(piece for piece in pieces if piece.box.size)
        return made

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The boxes that are here, none empty, and where."""
        return self._pieces

    def only(self, pieces: Iterable[Piece]) -> "BoxedTensor":
        """Return some pieces in the same memory; they may be parts of these."""
        return BoxedTensor(self.as_subclass(Tensor), self._global_shape, pieces)

    def copied(self, to: "BoxedTensor | None" = None) -> "BoxedTensor":
        """Return the same pieces in memory of the host, as much as they need.

        Args:
            to: an earlier copy of the same pieces, whose memory is used again.
        """
        outer = _around([piece.local for piece in self._pieces])
        source = self.as_subclass(Tensor)[outer.slices]
        copy = torch.empty_like(source, device="cpu") if to is None else to.as_subclass(Tensor)
        copy.copy_(source)
        moved = [Piece(piece.box, piece.local.within(outer).start) for piece in self._pieces]
        return BoxedTensor(copy, self._global_shape, moved)

    def size(self, dim: int | None = None) -> Any:
        """Return the shape of the whole model's tensor, as the planner compares it."""
        shape = torch.Size(self._global_shape)
        return shape if dim is None else shape[dim]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        """Return what is to be written: every box that is here, its rows one after the other."""
        assert self.as_subclass(Tensor).is_contiguous(), f"the reader relies on it for {fqn}"
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=_index(fqn, piece.box),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(_chunk(piece.box), properties, self.size()),
            )
            for piece in self._pieces
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return what is to be read: every box that is here."""
        return [_chunk(piece.box) for piece in self._pieces]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the memory of the box that begins at ``index.offset``."""
        own = self.as_subclass(Tensor)
        for piece in self._pieces:
            if torch.Size(piece.box.start) == index.offset:
                return _alone(own[piece.local.slices])
        raise AssertionError(f"{index} is no box of this rank")


class StreamedTensor(Tensor):
    """A whole tensor of the model that is made when it is written, and forgotten thereafter.

    It has a shape and a type, and no memory.

    Args:
        shape: of the tensor.
        dtype: of its elements.
        make: returns it, on the host; called once, by the thread that writes it.
    """

    _make: Callable[[], Tensor]

    def __new__(
        cls, shape: Shape, dtype: torch.dtype, make: Callable[[], Tensor]
    ) -> "StreamedTensor":
        """Describe a tensor; see the class."""
        made = Tensor._make_subclass(cls, torch.empty(shape, dtype=dtype, device="meta"))
        made._make = make
        return made

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        """Return what is to be written: all of it."""
        box, properties = Box.whole(self.shape), TensorProperties(dtype=self.dtype)
        data = TensorWriteData(_chunk(box), properties, self.shape)
        return [WriteItem(index=_index(fqn, box), type=WriteItemType.SHARD, tensor_data=data)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the memory that is written: the tensor, its rows one after the other."""
        made = self._make().contiguous()
        assert (made.shape, made.dtype) == (self.shape, self.dtype), f"{index.fqn} differs"
        return made


def _alone(tensor: Tensor) -> Tensor:
    """Return a tensor in the same memory whose storage ends where it does.

    PyTorch's writer copies tensors that lie in a larger storage, since ``torch.save`` would write
    all of that.
    """
    if not tensor.is_cpu or not tensor.is_contiguous() or not tensor.numel():
        return tensor
    memory = torch.from_numpy(tensor.reshape(-1).view(torch.uint8).numpy())
    return memory.view(tensor.dtype).view(tensor.shape)


def _index(name: str, box: Box) -> MetadataIndex:
    return MetadataIndex(name, torch.Size(box.start))


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.start), sizes=torch.Size(box.shape))


def _around(boxes: Sequence[Box]) -> Box:
    """Return the smallest box that holds all of several."""
    start = tuple(map(min, *(box.start for box in boxes), boxes[0].start))
    stop = tuple(map(max, *(box.stop for box in boxes), boxes[0].stop))
    return Box(start, tuple(b - a for a, b in zip(start, stop, strict=True)))
