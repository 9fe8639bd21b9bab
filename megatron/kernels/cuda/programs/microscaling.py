"""The Triton program that rounds a matrix with a scale for every 32 numbers (MXFP8).

A program rounds a square of 128 x 128 numbers, whose scales are a whole tile of 512 bytes, by rows
and by columns (``kernels/microscaling.py``).

Shapes: s rows, k numbers of a row; within a square, c groups of g numbers.
"""

import triton
import triton.language as tl

from megatron.kernels.cuda.programs.block_products import magnitudes, powers_of_two
from megatron.kernels.cuda.programs.eight_bits import eight_bits_of

_SIDE = tl.constexpr(128)
_GROUP = tl.constexpr(32)
_GROUPS = tl.constexpr(4)
_TILE = tl.constexpr(512)


@triton.jit
def _store_scales(tiles, tile, row, group, worth):
    """Store the worths of a square at their places in its tile: rows 0, 32, 64, 96 side by side."""
    place = row % 32 * 16 + row // 32 * 4 + group
    exponent = (worth.to(tl.int32, bitcast=True) >> 23).to(tl.uint8)
    tl.store(tiles + tile.to(tl.int64) * _TILE + place, exponent)


@triton.jit
def quantise_mx(
    straight_sk,
    straight_tiles,
    turned_ks,
    turned_tiles,
    x_sk,
    s,
    k,
    MOST: tl.constexpr,
    E5M2: tl.constexpr,
    STRAIGHT: tl.constexpr,
    TURNED: tl.constexpr,
):
    """Round a square, straight and turned; each group of a result's row has a scale of its own."""
    # Offsets within the square are short, so that a thread needs few registers.
    first, first_column = tl.program_id(0) * _SIDE, tl.program_id(1) * _SIDE
    begin = first.to(tl.int64) * k + first_column
    if STRAIGHT:
        row = tl.arange(0, _SIDE)[:, None, None]
        group = tl.arange(0, _GROUPS)[None, :, None]
        column = group * _GROUP + tl.arange(0, _GROUP)[None, None, :]
        here = (row < s - first) & (column < k - first_column)
        source = row * k + column
        x = tl.load(x_sk + begin + source, mask=here, other=0.0).to(tl.float32)
        scale, worth = powers_of_two(tl.max(magnitudes(x), 2, keep_dims=True), E5M2)
        tl.store(straight_sk + begin + source, eight_bits_of(x, scale, MOST, E5M2), mask=here)
        tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        _store_scales(straight_tiles, tile, row, group, worth)
    if TURNED:  # read again, out of the cache: groups of columns lie elsewhere in the threads
        group = tl.arange(0, _GROUPS)[:, None, None]
        row = group * _GROUP + tl.arange(0, _GROUP)[None, :, None]
        column = tl.arange(0, _SIDE)[None, None, :]
        here = (row < s - first) & (column < k - first_column)
        x = tl.load(x_sk + begin + row * k + column, mask=here, other=0.0).to(tl.float32)
        scale, worth = powers_of_two(tl.max(magnitudes(x), 1, keep_dims=True), E5M2)
        bits = tl.reshape(eight_bits_of(x, scale, MOST, E5M2), (_SIDE, _SIDE))
        to_row, to_column = tl.arange(0, _SIDE)[:, None], tl.arange(0, _SIDE)[None, :]
        there = (to_row < k - first_column) & (to_column < s - first)
        out = turned_ks + first_column.to(tl.int64) * s + first
        tl.store(out + to_row * s + to_column, tl.trans(bits), mask=there)
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        _store_scales(turned_tiles, tile, column, group, worth)
