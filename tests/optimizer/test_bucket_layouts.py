"""Buckets of whole matrices: none is cut, and the replicas have about as much of them."""

from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from megatron.model.ownership import OwnedParameter
from megatron.optimizer.bucket import VECTOR
from megatron.optimizer.bucket_layouts import bucket_layouts
from megatron.parallel.box import Box, Piece

MATRICES = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=8)


def owned(shape: tuple[int, ...]) -> OwnedParameter:
    box = Box((0,) * len(shape), shape)
    parameter = nn.Parameter(torch.empty(shape, device="meta"))
    return OwnedParameter("weight", parameter, shape, (Piece(box, box.start),))


@given(buckets=st.lists(MATRICES, min_size=1, max_size=4), shards=st.integers(2, 9))
def test_matrices_are_whole_and_shared_evenly(
    buckets: list[list[tuple[int, int]]], shards: int
) -> None:
    layouts = bucket_layouts([[*map(owned, shapes)] for shapes in buckets], shards, lambda _: True)
    held = [0] * shards
    for layout, shapes in zip(layouts, buckets, strict=True):
        covered = torch.zeros(layout.size, dtype=torch.int)
        for start, shape in zip(layout.starts, shapes, strict=True):
            end = start + prod(shape)
            covered[start:end] += 1
            assert start % VECTOR == 0
            assert any(
                layout.shard(k).start <= start and end <= layout.shard(k).stop
                for k in range(shards)
            )
        assert covered.max() == 1
        assert layout.size < sum(map(prod, shapes)) + VECTOR * len(shapes)
        held = [old + new for old, new in zip(held, layout.sizes, strict=True)]
    largest = max(prod(shape) for shapes in buckets for shape in shapes)
    assert max(held) - min(held) < largest + VECTOR


def test_a_usual_chunk_is_shared_evenly_by_four() -> None:
    """Four layers of 3, 1, 4 and 4 h x h: 12 h x h for each of four replicas."""
    h = 64
    layers = 4 * [(3 * h, h), (h, h), (4 * h, h), (h, 4 * h)]
    [layout] = bucket_layouts([[owned(shape) for shape in layers]], 4, lambda _: True)
    assert layout.sizes == (12 * h * h,) * 4


def test_other_parameters_may_be_cut() -> None:
    matrix, vector = owned((48, 16)), owned((32,))
    whole, rows = bucket_layouts([[matrix], [vector]], 2, lambda one: one is matrix)
    assert whole.sizes == (48 * 16, 0)
    assert rows.sizes == (16, 16)
