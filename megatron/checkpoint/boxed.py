"""A rank's part of a tensor of the whole model, as PyTorch's distributed checkpoints understand it.

``torch.distributed.checkpoint`` asks a tensor for its parts by three methods: the parts to write,
the parts to read, and the memory of one part. Its planner then finds out which parts of which files
a rank needs, for a checkpoint of any grid of ranks. Parts that several ranks hold are written once.
A box is the range of indices that a part has in the whole model's tensor.
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

    The memory is shared with this rank's tensor; ``size`` is the size of the whole model's tensor.

    Args:
        tensor: tensor of this rank.
        global_shape: shape of the whole model's tensor.
        pieces: the boxes that this rank holds, and their places in ``tensor``.
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
        """The boxes that this rank holds, without empty boxes, and their places in the tensor."""
        return self._pieces

    def only(self, pieces: Iterable[Piece]) -> "BoxedTensor":
        """Return some pieces, or parts of pieces, in the same memory."""
        return BoxedTensor(self.as_subclass(Tensor), self._global_shape, pieces)

    def copied(self, to: "BoxedTensor | None" = None) -> "BoxedTensor":
        """Return a copy of the pieces in the host's memory, without the space around them.

        Args:
            to: an earlier copy of the same pieces, whose memory is reused.
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
        """Return the parts to write: every box of this rank, its rows one after the other."""
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
        """Return the parts to read: every box of this rank."""
        return [_chunk(piece.box) for piece in self._pieces]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the memory of the box that begins at ``index.offset``."""
        own = self.as_subclass(Tensor)
        for piece in self._pieces:
            if torch.Size(piece.box.start) == index.offset:
                return _alone(own[piece.local.slices])
        raise AssertionError(f"{index} is no box of this rank")


class StreamedTensor(Tensor):
    """A whole tensor of the model that is made when it is written, and freed afterwards.

    Until then it has a shape and a dtype, and no memory.

    Args:
        shape: shape of the tensor.
        dtype: dtype of its elements.
        make: returns the tensor, on the host; the thread that writes the tensor calls it once.
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
        """Return the part to write: the whole tensor."""
        box, properties = Box.whole(self.shape), TensorProperties(dtype=self.dtype)
        data = TensorWriteData(_chunk(box), properties, self.shape)
        return [WriteItem(index=_index(fqn, box), type=WriteItemType.SHARD, tensor_data=data)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the memory that is written: the tensor, its rows one after the other."""
        made = self._make().contiguous()
        assert (made.shape, made.dtype) == (self.shape, self.dtype), f"{index.fqn} differs"
        return made


def _alone(tensor: Tensor) -> Tensor:
    """Return a tensor in the same memory, with a storage that holds nothing else.

    PyTorch's writer copies tensors that lie in a larger storage, because ``torch.save`` would write
    the whole storage.
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
    """Return the smallest box that holds all ``boxes``."""
    start = tuple(map(min, *(box.start for box in boxes), boxes[0].start))
    stop = tuple(map(max, *(box.stop for box in boxes), boxes[0].stop))
    return Box(start, tuple(b - a for a, b in zip(start, stop, strict=True)))
