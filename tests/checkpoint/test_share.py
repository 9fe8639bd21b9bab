"""Ranks that hold the same boxes write equal parts of them, every element once."""

from math import prod

import pytest
import torch
from harness.rank_pool import RankPool
from hypothesis import given
from hypothesis import strategies as st

from megatron.checkpoint.boxed import BoxedTensor
from megatron.checkpoint.share import Part, part_of, share
from megatron.parallel.box import Box, Piece, check_tiling, shard, whole
from megatron.parallel.groups import ConnectedAxis

SHAPES = st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple)


@st.composite
def held(draw: st.DrawFn) -> dict[str, BoxedTensor]:
    """What a rank may hold: whole tensors, and shards of fused ones, with padding."""
    found = {}
    for number in range(draw(st.integers(0, 5))):
        shape = draw(SHAPES)
        dtype = draw(st.sampled_from([torch.float32, torch.float64]))
        tensor = torch.arange(1.0, prod(shape) + 1, dtype=dtype).view(shape)
        pieces = whole(shape)
        if draw(st.booleans()):
            shape = (4 * shape[0], *shape[1:])
            pieces = shard(shape, 0, draw(st.integers(0, 1)), 2, fused=2)
            tensor = torch.randn(2 * shape[0] // 4 + draw(st.integers(0, 2)), *shape[1:])
        found[str(number)] = BoxedTensor(tensor, shape, pieces)
    return found


def content(tensors: dict[str, BoxedTensor]) -> dict[str, list[tuple[Box, torch.Tensor]]]:
    """The boxes of tensors with their values, as the writer gets them."""
    found: dict[str, list[tuple[Box, torch.Tensor]]] = {}
    for name, tensor in tensors.items():
        for item in tensor.__create_write_items__(name, None):
            value = tensor.__get_tensor_shard__(item.index)
            box = Box(tuple(item.index.offset or ()), tuple(value.shape))
            found.setdefault(name, []).append((box, value))
    return found


@given(held(), st.integers(1, 5), st.booleans())
def test_the_parts_are_everything_once_and_equal_but_for_a_row(
    tensors: dict[str, BoxedTensor], holders: int, copied: bool
) -> None:
    parts = [share(tensors, (place, holders)) for place in range(holders)]
    if copied:
        parts = [{name: own.copied() for name, own in part.items()} for part in parts]
    everything = content(tensors)
    for name, whole_boxes in everything.items():
        own = [entry for part in parts for entry in content(part).get(name, [])]
        for box, value in whole_boxes:
            inside = [(b, v) for b, v in own if (b & box).size]
            check_tiling(box.shape, [b.within(box) for b, _ in inside])
            for b, v in inside:
                assert torch.equal(value[b.within(box).slices], v)
        assert sum(b.size for b, _ in own) == sum(b.size for b, _ in whole_boxes)
    sizes = [sum(v.nbytes for boxes in content(part).values() for _, v in boxes) for part in parts]
    rows = [v[:1].nbytes for boxes in everything.values() for _, v in boxes]
    assert max(sizes) - min(sizes) <= 2 * max(rows, default=0)


def test_a_copy_takes_no_more_memory_than_its_part() -> None:
    big = BoxedTensor(torch.randn(100, 10), (100, 10), whole((100, 10)))
    for place in range(4):
        [own] = share({"w": big}, (place, 4)).values()
        copy = own.copied().as_subclass(torch.Tensor)
        assert copy.shape == (25, 10)
        assert copy.untyped_storage().nbytes() == 25 * 10 * 4


def test_a_copy_takes_the_memory_of_an_earlier_one() -> None:
    tensor = torch.zeros(4, 3)
    boxed = BoxedTensor(tensor, (8, 3), (Piece(Box((4, 0), (4, 3)), (0, 0)),))
    first = boxed.copied()
    tensor.fill_(2.0)
    assert not first.as_subclass(torch.Tensor).any(), "it is a copy"
    second = boxed.copied(first)
    assert second.data_ptr() == first.data_ptr()
    assert torch.equal(second.as_subclass(torch.Tensor), tensor)


def part_on_rank(rank: int, world_size: int, *, rows: list[int]) -> Part:
    size = rows[rank]
    tensors = {"w": BoxedTensor(torch.ones(size, 2), (9, 2), whole((size, 2)))}
    return part_of(tensors, ConnectedAxis("world", rank, tuple(range(world_size))))


@pytest.mark.parametrize(
    ("rows", "parts"),
    [
        ([5, 5, 5, 5], [(0, 4), (1, 4), (2, 4), (3, 4)]),
        ([5, 6, 5, 6], [(0, 2), (0, 2), (1, 2), (1, 2)]),
        ([5, 6, 7, 8], [(0, 1)] * 4),
    ],
)
def test_ranks_find_out_who_holds_the_same(
    rows: list[int], parts: list[Part], ranks: RankPool
) -> None:
    assert ranks.run(part_on_rank, 4, rows=rows) == parts
