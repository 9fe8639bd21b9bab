"""Triton programs of products in 8 bits with scales of blocks, for groups of rows or for one.

A tile that is rounded is as large as a block, so that a program finds all scales of its tile by
itself. A product multiplies the sum over every block by the worths of both blocks, and adds up in
fp32. (Tensor cores of Hopper have fewer bits than fp32, but only for the sum within a block.)

In turned rows every group begins at a multiple of the block, and behind its end are zeros up to the
next multiple of 16. So the number of a group's tile, among the tiles of all groups, is the number
of its block.

Shapes: s rows of all groups, g groups, k width of a factor, n rows of a matrix, b and c blocks of
rows and columns; o outputs, i inputs and p places of turned factors.
"""

import triton
import triton.language as tl

from megatron.kernels.cuda.programs.eight_bits import eight_bits_of

_MULTIPLE = tl.constexpr(16)
_LEAST = tl.constexpr((127 - 100) << 23)  # the bits of LEAST in ``kernels/eight_bits.py``
_INFINITY = tl.constexpr(0x7F800000)
_ABOVE_1_75 = tl.constexpr(0x1FFFFF)


@triton.jit
def magnitudes(x):
    """Return the bits of magnitudes: integers in the order of the numbers, NaN above infinity."""
    return tl.abs(x).to(tl.int32, bitcast=True)


@triton.jit
def powers_of_two(largest, E5M2: tl.constexpr):
    """Return the scale and the worth for the bits of a largest magnitude; see ``eight_bits.py``."""
    exponent_of_most: tl.constexpr = 15 if E5M2 else 8
    exponent = (tl.minimum(tl.maximum(largest, _LEAST), _INFINITY) + _ABOVE_1_75) >> 23
    scale = (exponent_of_most + 254 - exponent) << 23
    worth = (exponent - exponent_of_most) << 23
    return scale.to(tl.float32, bitcast=True), worth.to(tl.float32, bitcast=True)


@triton.jit
def _rows_of(tile, ends_g, s, g, ROWS: tl.constexpr, GROUPS: tl.constexpr, WHOLE: tl.constexpr):
    """Return a tile's group, its first row, and the row behind the last one of the group."""
    if WHOLE:
        own = tile * 0
        first = tile * ROWS
        own_end = s
    else:
        group = tl.arange(0, GROUPS)
        end = tl.load(ends_g + group, mask=group < g, other=0)
        begin = tl.load(ends_g + group - 1, mask=(group > 0) & (group < g), other=0)
        tiles = tl.where(group < g, (end - begin + ROWS - 1) // ROWS, 0)
        before = tl.cumsum(tiles, 0) - tiles
        is_own = (tile >= before) & (tile < before + tiles)
        own = tl.sum(tl.where(is_own, group, 0), 0)
        first = tl.sum(tl.where(is_own, begin + (tile - before) * ROWS, 0), 0)
        own_end = tl.sum(tl.where(is_own, end, 0), 0)
    return own, first, own_end


@triton.jit(do_not_specialize=["s"])
def quantise_blocks(
    straight_sk,
    straight_worth_cs,
    turned_kp,
    turned_worth_bk,
    x_sk,
    ends_g,
    s,
    g,
    k,
    p,
    MOST: tl.constexpr,
    E5M2: tl.constexpr,
    STRAIGHT: tl.constexpr,
    TURNED: tl.constexpr,
    WHOLE: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Round a tile of rows; each row of a result has a scale of its own in the tile."""
    tile = tl.program_id(0)
    _, first, end = _rows_of(tile, ends_g, s, g, ROWS, GROUPS, WHOLE)
    if first < end:
        # Offsets within the tile are short, so that a thread needs few registers.
        row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
        first_column = tl.program_id(1) * COLUMNS
        in_rows, in_columns = row < end - first, column < k - first_column
        here = in_rows[:, None] & in_columns[None, :]
        begin = first.to(tl.int64) * k + first_column
        source = row[:, None] * k + column[None, :]
        x = tl.load(x_sk + begin + source, mask=here, other=0.0).to(tl.float32)
        if STRAIGHT:
            scale, worth = powers_of_two(tl.max(magnitudes(x), 1), E5M2)
            bits = eight_bits_of(x, scale[:, None], MOST, E5M2)
            tl.store(straight_sk + begin + source, bits, mask=here)
            to = straight_worth_cs + tl.program_id(1).to(tl.int64) * s + first
            tl.store(to + row, worth, mask=in_rows)
        if TURNED:
            if STRAIGHT:  # read again, out of the cache: a thread has too few registers for both
                x = tl.load(x_sk + begin + source, mask=here, other=0.0).to(tl.float32)
            scale, worth = powers_of_two(tl.max(magnitudes(x), 0), E5M2)
            turned = tl.trans(eight_bits_of(x, scale[None, :], MOST, E5M2))
            place = tile * ROWS
            used = (end - first + _MULTIPLE - 1) // _MULTIPLE * _MULTIPLE
            there = in_columns[:, None] & ((row < used) & (row < p - place))[None, :]
            out = turned_kp + first_column.to(tl.int64) * p + place
            tl.store(out + column[:, None] * p + row[None, :], turned, mask=there)
            to = turned_worth_bk + tile.to(tl.int64) * k + first_column
            tl.store(to + column, worth, mask=in_columns)


@triton.jit
def quantise_squares(
    straight_gnk,
    turned_gkn,
    worth_gbc,
    turned_worth_gcb,
    x_gnk,
    n,
    k,
    MOST: tl.constexpr,
    E5M2: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Round a square of a matrix, which has one scale, straight and turned."""
    group = tl.program_id(2).to(tl.int64)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    here = (row < n)[:, None] & (column < k)[None, :]
    source = group * n * k + row[:, None] * k + column[None, :]
    x = tl.load(x_gnk + source, mask=here, other=0.0).to(tl.float32)
    scale, worth = powers_of_two(tl.max(tl.max(magnitudes(x), 1), 0), E5M2)
    bits = eight_bits_of(x, scale, MOST, E5M2)
    tl.store(straight_gnk + source, bits, mask=here)
    to = group * n * k + column[:, None] * n + row[None, :]
    there = (column < k)[:, None] & (row < n)[None, :]
    tl.store(turned_gkn + to, tl.trans(bits), mask=there)
    b, c = tl.num_programs(0), tl.num_programs(1)
    tl.store(worth_gbc + (group * b + tl.program_id(0)) * c + tl.program_id(1), worth)
    tl.store(turned_worth_gcb + (group * c + tl.program_id(1)) * b + tl.program_id(0), worth)


@triton.jit(do_not_specialize=["s"])
def grouped_block_product(
    out_sn,
    left_sk,
    left_worth_cs,
    right_gnk,
    right_worth_gbc,
    bias_n,
    ends_g,
    s,
    g,
    n,
    k,
    BIAS: tl.constexpr,
    WHOLE: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Form a tile of every row times the rows of its group's matrix.

    ``SHARED`` is as in ``grouped.grouped_product``; a tile has as many columns as a square.
    """
    program = tl.program_id(0)
    columns = (n + COLUMNS - 1) // COLUMNS
    within = program % (SHARED * columns)
    tile = (program // (SHARED * columns)) * SHARED + within % SHARED
    square = within // SHARED
    group, first, end = _rows_of(tile, ends_g, s, g, ROWS, GROUPS, WHOLE)
    if first < end:
        own_group = group.to(tl.int64)
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        column = (square * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
        depth = tl.arange(0, DEPTH).to(tl.int64)
        left = left_sk + row[:, None] * k + depth[None, :]
        right = right_gnk + own_group * n * k + column[None, :] * k + depth[:, None]
        left_worth = left_worth_cs + row
        right_worth = right_worth_gbc + (own_group * columns + square) * ((k + DEPTH - 1) // DEPTH)
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for rest in range(k, 0, -DEPTH):
            inside = depth < rest
            own = tl.load(left, mask=(row < end)[:, None] & inside[None, :], other=0.0)
            matrix = tl.load(right, mask=inside[:, None] & (column < n)[None, :], other=0.0)
            worth = tl.load(left_worth, mask=row < end, other=0.0) * tl.load(right_worth)
            total += tl.dot(own, matrix) * worth[:, None]
            left += DEPTH
            right += DEPTH
            left_worth += s
            right_worth += 1
        if BIAS:
            total += tl.load(bias_n + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
        to = row[:, None] * n + column[None, :]
        here = (row < end)[:, None] & (column < n)[None, :]
        tl.store(out_sn + to, total.to(out_sn.dtype.element_ty), mask=here)


@triton.jit
def grouped_block_weight_product(
    out_goi,
    grad_op,
    grad_worth_bo,
    x_ip,
    x_worth_bi,
    ends_g,
    g,
    o,
    i,
    p,
    ADDS: tl.constexpr,
    WHOLE: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Form a tile of ``grad.T @ x`` of a group's rows, or add it to a sum.

    A group without rows gets zeros, or leaves the sum as it is.
    """
    own = tl.program_id(1)
    if WHOLE:
        block = own * 0
        wide = p // _MULTIPLE
    else:
        group = tl.arange(0, GROUPS)
        end = tl.load(ends_g + group, mask=group < g, other=0)
        begin = tl.load(ends_g + group - 1, mask=(group > 0) & (group < g), other=0)
        rows = tl.where(group < g, end - begin, 0)
        block = tl.sum(tl.where(group < own, (rows + DEPTH - 1) // DEPTH, 0), 0)
        # Counted in multiples, so that the compiler sees that masks change at multiples.
        wide = tl.sum(tl.where(group == own, (rows + _MULTIPLE - 1) // _MULTIPLE, 0), 0)
    columns = (i + COLUMNS - 1) // COLUMNS
    output = ((tl.program_id(0) // columns) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = ((tl.program_id(0) % columns) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    depth = tl.arange(0, DEPTH)
    first = block.to(tl.int64) * DEPTH
    grad = grad_op + output[:, None] * p + first + depth[None, :]
    x = x_ip + column[None, :] * p + first + depth[:, None]
    grad_worth = grad_worth_bo + block.to(tl.int64) * o + output
    x_worth = x_worth_bi + block.to(tl.int64) * i + column
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for rest in range(wide * _MULTIPLE, 0, -DEPTH):
        inside = depth < rest
        own_grad = tl.load(grad, mask=(output < o)[:, None] & inside[None, :], other=0.0)
        own_x = tl.load(x, mask=inside[:, None] & (column < i)[None, :], other=0.0)
        left = tl.load(grad_worth, mask=output < o, other=0.0)
        right = tl.load(x_worth, mask=column < i, other=0.0)
        total += tl.dot(own_grad, own_x) * left[:, None] * right[None, :]
        grad += DEPTH
        x += DEPTH
        grad_worth += o
        x_worth += i
    here = (output < o)[:, None] & (column < i)[None, :]
    out = out_goi + own.to(tl.int64) * o * i + output[:, None] * i + column[None, :]
    if ADDS:
        here = here & (wide > 0)
        total += tl.load(out, mask=here, other=0.0).to(tl.float32)
    tl.store(out, total.to(out_goi.dtype.element_ty), mask=here)
