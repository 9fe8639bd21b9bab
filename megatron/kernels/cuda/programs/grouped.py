"""Triton programs of products of groups of rows, each with a matrix of its own.

The rows of a group lie one after the other. How many rows each group has is known on the device
only, so the host launches as many programs as any sizes of groups may need. A program finds its
rows in the ends of the groups, and returns at once if there are none for it. Sums are fp32.

Shapes: s rows of all groups, g groups, i inputs, o outputs.
"""

import triton
import triton.language as tl


@triton.jit
def _rows_of(tile, ends_g, g, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """Return the group of a tile of rows, the tile's first row, and the end of the group."""
    group = tl.arange(0, GROUPS)
    end = tl.load(ends_g + group, mask=group < g, other=0)
    begin = tl.load(ends_g + group - 1, mask=(group > 0) & (group < g), other=0)
    tiles = tl.where(group < g, (end - begin + ROWS - 1) // ROWS, 0)
    after = tl.cumsum(tiles, 0)
    before = after - tiles
    is_own = (tile >= before) & (tile < after)
    first = begin + (tile - before) * ROWS
    own = tl.sum(tl.where(is_own, group, 0), 0)
    return own, tl.sum(tl.where(is_own, first, 0), 0), tl.sum(tl.where(is_own, end, 0), 0)


@triton.jit
def grouped_product(
    out_so,
    x_si,
    weight_gio,
    ends_g,
    g,
    o,
    i,
    TURNED: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Compute a tile of the result: rows times the matrix of their group.

    ``SHARED`` tiles of rows follow each other before the next columns begin, so that programs at
    work together share factors. ``TURNED`` matrices lie in memory as [o, i].
    """
    program = tl.program_id(0)
    columns = (o + COLUMNS - 1) // COLUMNS
    chunk = program // (SHARED * columns)
    within = program % (SHARED * columns)
    tile = chunk * SHARED + within % SHARED
    group, first, end = _rows_of(tile, ends_g, g, ROWS, GROUPS)
    if first < end:
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        column = ((within // SHARED) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
        depth = tl.arange(0, DEPTH).to(tl.int64)
        x = x_si + row[:, None] * i + depth[None, :]
        weight = weight_gio + group.to(tl.int64) * o * i
        if TURNED:
            weight = weight + column[None, :] * i + depth[:, None]
            step = DEPTH
        else:
            weight = weight + depth[:, None] * o + column[None, :]
            step = DEPTH * o
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for left in range(i, 0, -DEPTH):
            inside = depth < left
            own_x = tl.load(x, mask=(row < end)[:, None] & inside[None, :], other=0.0)
            own_weight = tl.load(weight, mask=inside[:, None] & (column < o)[None, :], other=0.0)
            total = tl.dot(own_x, own_weight, total, input_precision="ieee")
            x += DEPTH
            weight += step
        place = row[:, None] * o + column[None, :]
        here = (row < end)[:, None] & (column < o)[None, :]
        tl.store(out_so + place, total.to(out_so.dtype.element_ty), mask=here)


@triton.jit
def _put(out, total, row, column, rows, columns, stride, is_empty, ADDS: tl.constexpr):
    """Write a tile, or add it to what is there, within so many rows and columns."""
    here = (row < rows)[:, None] & (column < columns)[None, :]
    place = out + row[:, None] * stride + column[None, :]
    if ADDS:
        here = here & (is_empty == 0)
        total += tl.load(place, mask=here, other=0.0).to(tl.float32)
    tl.store(place, total.to(out.dtype.element_ty), mask=here)


@triton.jit
def grouped_weight_product(
    out_goi,
    grad_so,
    x_si,
    ends_g,
    o,
    i,
    ADDS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Compute a tile of ``grad.T @ x`` from a group's rows; write it, or add it to a sum.

    A group without rows gets zeros, or leaves the sum as it is. A thread needs few registers, so
    that a multiprocessor has two programs, of which one multiplies while the other one writes:
    offsets within a tile are short, and one half of the tile is written after the other.
    """
    group = tl.program_id(1)
    columns = (i + COLUMNS - 1) // COLUMNS
    first_output = (tl.program_id(0) // columns) * ROWS
    first_column = (tl.program_id(0) % columns) * COLUMNS
    output, column, row = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, DEPTH)
    outputs, inputs = o - first_output, i - first_column
    end = tl.load(ends_g + group)
    begin = tl.load(ends_g + group - 1, mask=group > 0, other=0)
    grad = grad_so + begin.to(tl.int64) * o + first_output
    x = x_si + begin.to(tl.int64) * i + first_column
    of_grad = row[None, :] * o + output[:, None]
    of_x = row[:, None] * i + column[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(begin, end, DEPTH):
        inside = row < end - first
        own_grad = tl.load(
            grad + of_grad, mask=(output < outputs)[:, None] & inside[None, :], other=0.0
        )
        own_x = tl.load(x + of_x, mask=inside[:, None] & (column < inputs)[None, :], other=0.0)
        total = tl.dot(own_grad, own_x, total, input_precision="ieee")
        grad += DEPTH * o
        x += DEPTH * i
    HALF: tl.constexpr = COLUMNS // 2
    left, right = tl.split(tl.permute(tl.reshape(total, [ROWS, 2, HALF]), [0, 2, 1]))
    column = tl.arange(0, HALF)
    out = out_goi + (group.to(tl.int64) * o + first_output) * i + first_column
    _put(out, left, output, column, outputs, inputs, i, begin == end, ADDS)
    _put(out + HALF, right, output, column, outputs, inputs - HALF, i, begin == end, ADDS)
