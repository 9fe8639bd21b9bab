"""Boxes as index sets: every operation means what it means for the sets of indices."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.parallel.box import Box, check_tiling, overlaps, shard, whole

SHAPE = (5, 4)


def indices(box: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(a, b) for a, b in zip(box.start, box.stop, strict=True))))


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    """A box inside ``SHAPE``, maybe empty."""
    start = tuple(draw(st.integers(0, n)) for n in SHAPE)
    return Box(start, tuple(draw(st.integers(0, n - a)) for n, a in zip(SHAPE, start, strict=True)))


@given(boxes(), boxes())
def test_what_boxes_have_in_common_is_the_intersection_of_their_indices(a: Box, b: Box) -> None:
    assert indices(a & b) == indices(a) & indices(b)
    assert a.size == len(indices(a))


@given(boxes(), st.tuples(st.integers(0, 3), st.integers(0, 3)))
def test_a_moved_box_comes_back(box: Box, offset: tuple[int, int]) -> None:
    moved = box.moved(offset)
    assert indices(moved) == {(i + offset[0], j + offset[1]) for i, j in indices(box)}
    assert box.within(box) == Box.whole(box.shape)
    assert moved.within(Box(offset, SHAPE)) == box


@given(boxes(), st.data())
def test_rows_cut_a_box(box: Box, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, box.shape[0]))
    parts = box.rows(0, at), box.rows(at, box.shape[0])
    assert indices(parts[0]) | indices(parts[1]) == indices(box)
    assert not indices(parts[0]) & indices(parts[1])


@given(st.lists(boxes(), max_size=6))
def test_overlaps_are_those_of_the_indices(many: list[Box]) -> None:
    expected = sum(bool(indices(a) & indices(b)) for i, a in enumerate(many) for b in many[i + 1 :])
    assert len(list(overlaps(many))) == expected


@given(st.lists(boxes(), max_size=6))
def test_a_tiling_has_every_index_once(many: list[Box]) -> None:
    counted = [index for box in many for index in indices(box)]
    if sorted(counted) == sorted(indices(Box.whole(SHAPE))):
        check_tiling(SHAPE, many)
    else:
        with pytest.raises(ValueError, match=r"overlap|covered"):
            check_tiling(SHAPE, many)


def test_a_box_outside_is_named() -> None:
    with pytest.raises(ValueError, match=r"start=\(4, 0\).*not inside.*\(5, 4\)"):
        check_tiling(SHAPE, [Box((0, 0), (4, 4)), Box((4, 0), (2, 4))])


@given(
    st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(0, 1), st.integers(1, 3)
)
def test_shards_tile_the_whole_and_their_own_tensors(
    fused: int, shards: int, length: int, dimension: int, other: int
) -> None:
    shape, own = [other, other], [other, other]
    shape[dimension], own[dimension] = fused * shards * length, fused * length
    ranks = [shard(shape, dimension, index, shards, fused) for index in range(shards)]
    check_tiling(shape, [piece.box for pieces in ranks for piece in pieces])
    for pieces in ranks:
        check_tiling(own, [piece.local for piece in pieces])


def test_the_halves_of_a_gated_projection_are_cut_apart() -> None:
    gate, up = shard((8, 3), 0, 1, 2, fused=2)
    assert (gate.box, gate.at) == (Box((2, 0), (2, 3)), (0, 0))
    assert (up.box, up.at) == (Box((6, 0), (2, 3)), (2, 0))
    assert shard((8, 3), 0, 0, 1) == whole((8, 3))


def test_what_does_not_split_is_an_error() -> None:
    with pytest.raises(AssertionError, match="does not split"):
        shard((6, 3), 0, 0, 4)
