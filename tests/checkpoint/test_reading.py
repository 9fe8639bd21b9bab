"""Tensors are read as PyTorch's own reader reads them, whatever the boxes, types and sizes."""

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness.properties import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron.checkpoint import storage
from megatron.checkpoint.boxed import BoxedTensor
from megatron.checkpoint.folder import DamagedError
from megatron.parallel.box import Box, Piece, Shape, whole
from megatron.parallel.groups import ConnectedAxis

ALONE = ConnectedAxis("world", 0, (0,))


@st.composite
def cuts(draw: st.DrawFn, shape: Shape) -> list[Box]:
    """Boxes that tile a tensor, from cuts in any dimension."""
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 3))):
        dimension = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, shape[dimension]))
        halves = []
        for box in boxes:
            a, b = box.start[dimension], box.stop[dimension]
            middle = min(max(at, a), b)
            for first, last in ((a, middle), (middle, b)):
                start = (*box.start[:dimension], first, *box.start[dimension + 1 :])
                size = (*box.shape[:dimension], last - first, *box.shape[dimension + 1 :])
                halves.append(Box(start, size))
        boxes = [box for box in halves if box.size]
    return boxes


def stacked(boxes: list[Box], content: torch.Tensor) -> tuple[torch.Tensor, tuple[Piece, ...]]:
    """A rank's tensor in which boxes lie corner to corner, and where."""
    shape = [sum(box.shape[d] for box in boxes) for d in range(content.dim())]
    own, at, pieces = torch.zeros(shape, dtype=content.dtype), [0] * content.dim(), []
    for box in boxes:
        piece = Piece(box, tuple(at))
        own[piece.local.slices] = content[box.slices]
        pieces.append(piece)
        at = [a + n for a, n in zip(at, box.shape, strict=True)]
    return own, tuple(pieces)


@settings(max_examples=examples(40))
@given(st.data())
def test_any_boxes_of_what_any_boxes_have_saved(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    root = tmp_path_factory.mktemp("boxes")
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    types = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])
    content = torch.randn(shape).to(data.draw(types))
    own, pieces = stacked(data.draw(cuts(shape)), content)
    where = storage.write(root, 1, {"w": BoxedTensor(own, shape, pieces)}, {}, ALONE)
    wanted = data.draw(cuts(shape))
    target, places = stacked(wanted, torch.zeros(shape, dtype=data.draw(types)))
    storage.read(where, {"w": BoxedTensor(target, shape, places)}, ALONE)
    for piece in places:
        assert torch.equal(target[piece.local.slices], content[piece.box.slices].to(target.dtype))


def test_pytorch_reads_the_same(tmp_path: Path) -> None:
    """So that a checkpoint can be used without this program."""
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(7).bfloat16(), "c": torch.randn(2, 3, 4)}
    boxed = {n: BoxedTensor(t, tuple(t.shape), whole(t.shape)) for n, t in tensors.items()}
    where = storage.write(tmp_path, 1, boxed, {}, ALONE)
    read = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        dcp.load(read, checkpoint_id=where)
    for name, tensor in tensors.items():
        assert torch.equal(read[name], tensor)


def test_damage_is_named_by_its_file_whether_or_not_it_can_be_read(tmp_path: Path) -> None:
    tensor = torch.randn(50, 50)
    boxed = {"w": BoxedTensor(tensor, (50, 50), whole((50, 50)))}
    where = storage.write(tmp_path, 1, boxed, {}, ALONE)
    path = where / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    for damaged in (content[:-2000], bytes(len(content)), content[:500] + b"!" + content[501:]):
        path.write_bytes(damaged)
        with pytest.raises(DamagedError, match=r"__0_0\.distcp") as told:
            storage.read(where, boxed, ALONE)
        assert "were written" in str(told.value) or "digest differs" in str(told.value)


def test_what_lies_in_a_larger_tensor_is_written_without_a_copy() -> None:
    buffer = torch.randn(100).bfloat16()
    own = BoxedTensor(buffer[20:80].view(6, 10), (6, 10), whole((6, 10)))
    rows = own.only([Piece(Box((2, 0), (3, 10)), (2, 0))])
    shard = rows.__get_tensor_shard__(MetadataIndex("w", torch.Size((2, 0))))
    assert torch.equal(shard, buffer[40:70].view(3, 10))
    assert shard.data_ptr() == buffer[40:].data_ptr()
    assert shard.untyped_storage().nbytes() == shard.nbytes
