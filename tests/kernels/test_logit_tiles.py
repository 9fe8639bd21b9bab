"""A GPU that keeps no logits takes tiles of them: all fit into one memory, and none is left out."""

from operator import attrgetter

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from kernels.implementations import IMPLEMENTATIONS, Implementation
from kernels.test_output import assert_as_exact_as_autograd, on
from layers.vocabulary.sharded_output import ALGORITHM_1, ALGORITHM_2, NAIVE, by_shards, draw
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.kernels.counted import counted_kernels
from megatron.kernels.cuda import sizes
from megatron.kernels.cuda.sizes import (
    LEAST_TILES,
    LEAST_TOKENS,
    TILE_ROWS,
    slice_tokens,
    tile_rows,
)
from megatron.kernels.cuda.tiles import tiles
from megatron.kernels.softmax import LossOptions, Merged
from megatron.schedules.treatments import Treatment

META = torch.device("meta")
ON_A_GPU = [each for each in IMPLEMENTATIONS if each.name == "cuda"]
"""Kernels of a GPU in every type; without a GPU, Triton's interpreter runs them."""


@given(st.integers(1, 70_000), st.integers(1, 5000), st.booleans(), st.booleans())
def test_tiles_are_all_logits_once_in_the_memory_of_one(
    rows: int, tokens: int, again: bool, by_tokens: bool
) -> None:
    room = torch.empty(tile_rows(rows, again=again), tokens, device=META)
    assert room.numel() <= max(-(-rows // LEAST_TILES), TILE_ROWS) * tokens
    found = [
        (tile, memory.shape) for tile, memory in tiles(room, rows, tokens, by_tokens=by_tokens)
    ]
    ends = [0, 0]
    for tile, shape in found:
        assert shape == tuple(part.stop - part.start for part in tile)
        cut = [axis for axis, length in enumerate((rows, tokens)) if tile[axis] != slice(0, length)]
        assert len(cut) == (len(found) > 1)
        for axis in cut:
            assert tile[axis].start == ends[axis]
            ends[axis] = tile[axis].stop
    assert sum(shape.numel() for _, shape in found) == rows * tokens


@pytest.mark.parametrize(
    ("rows", "tokens", "shape", "number"),
    [
        (32_000, 4096, (32_000, 1024), 4),
        (32_000, 2048, (8000, 2048), 4),
        (256_000, 2048, (16_000, 2048), 16),
        (256_000, 16384, (256_000, 1024), 16),
    ],
)
def test_s_with_a_takes_few_rows_or_many_tokens(
    rows: int, tokens: int, shape: tuple[int, int], number: int
) -> None:
    room = torch.empty(tile_rows(rows, again=True), tokens, device=META)
    found = [memory.shape for _, memory in tiles(room, rows, tokens, by_tokens=True)]
    assert found == [torch.Size(shape)] * number
    assert tokens < LEAST_TOKENS * number or shape[0] == rows


@given(rows=st.integers(1, 300_000), tokens=st.integers(1, 40_000), again=st.booleans())
@example(rows=76_032, tokens=8192, again=True)
def test_slices_of_tokens_are_aligned_and_about_equal(rows: int, tokens: int, again: bool) -> None:
    """For 76,032 rows there is memory for 1,638 of 8,192 tokens: five such slices leave two."""
    at_once = slice_tokens(rows, tokens, tile_rows(rows, again=again) * tokens)
    if 0 < at_once < tokens:
        rest = tokens % at_once
        assert at_once % 8 == 0
        assert rest == 0 or 2 * rest > at_once


@pytest.mark.parametrize("tried", ON_A_GPU, ids=str)
@pytest.mark.parametrize("treatment", [ALGORITHM_2, ALGORITHM_1, NAIVE], ids=attrgetter("name"))
@pytest.mark.parametrize("least_tokens", [1, 100])
def test_either_way_gradients_are_those_of_the_whole(
    tried: Implementation,
    treatment: Treatment,
    least_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tiles of three rows or of three tokens; the maxima rise and fall from tile to tile."""
    monkeypatch.setattr(sizes, "LEAST_TOKENS", least_tokens)
    problem = on(tried, draw(13, 8, 23, LossOptions(23, 0.1, 1e-2, 4.0), magnitude=3.0))
    answer = by_shards(problem, 2, treatment, None, tried.kernels, recompute=True)
    assert_as_exact_as_autograd(tried, problem, answer)


@pytest.mark.parametrize("tried", ON_A_GPU, ids=str)
@pytest.mark.parametrize("softcap", [0.0, 4.0])
def test_statistics_alone_are_those_beside_kept_exponentials(
    tried: Implementation, softcap: float
) -> None:
    """In spans of 512 rows; the last one is not full. No logit is above 0 in the first span."""
    n, h, v = 130, 8, 1100
    x_nh, weight_vh = tried.activation(n, h).abs(), tried.activation(v, h, seed=1)
    weight_vh[:512] = -weight_vh[:512].abs()
    targets_n = (torch.arange(n, device=tried.device) * 37) % (v + 40)
    kernels, options = tried.kernels, LossOptions(v, 0.1, logit_softcap=softcap)
    alone, kept = (
        kernels.output_s(
            x_nh, weight_vh, targets_n, 20, options, room, form_gradient=False, keep=keep
        ).statistics_4n
        for keep, room in (
            (False, kernels.scratch_room(x_nh, v, again=False)),
            (True, kernels.kept_room(x_nh, v)),
        )
    )
    assert torch.equal(alone[0], kept[0])
    assert torch.equal(alone[2], kept[2])
    torch.testing.assert_close(alone[1], kept[1], rtol=1e-5, atol=0.0)
    torch.testing.assert_close(alone[3], kept[3], rtol=1e-5, atol=1e-3)


class Sums(TorchDispatchMode):
    """Notes the shape of every sum to which a product is added, or which a product begins."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # TorchDispatchMode has no types
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # the base class has no types either
        out = func(*args, **(kwargs or {}))
        if "mm" in str(func) and out.dtype == torch.float32:
            self.shapes.append(tuple(out.shape))
        return out


@pytest.mark.parametrize("form_gradient", [False, True])
def test_t_touches_every_row_of_the_weight_gradient_once(form_gradient: bool) -> None:
    n, h, v = 2048, 64, 256_000
    kernels, options = counted_kernels(torch.bfloat16), LossOptions(v)
    x_nh = torch.empty(n, h, dtype=torch.bfloat16, device=META)
    weight_vh = torch.empty(v, h, dtype=torch.bfloat16, device=META)
    targets_n = torch.empty(n, dtype=torch.int64, device=META)
    room = kernels.scratch_room(x_nh, v, again=True)
    state = kernels.output_s(
        x_nh, weight_vh, targets_n, 0, options, room, form_gradient=False, keep=False
    )
    total_vh, weight_n = torch.empty(v, h, device=META), torch.empty(n, device=META)
    merged = Merged(*state.statistics_4n)
    with Sums() as sums:
        kernels.output_t(
            state, weight_vh, total_vh, merged, weight_n, options, room, form_gradient=form_gradient
        )
    a_row = [shape for shape in sums.shapes if shape == (n, h)]
    assert sum(rows for rows, _ in sums.shapes) - n * len(a_row) == v
    assert len(a_row) == (16 if form_gradient else 0)
