"""Triton programs of products of groups in 8 bits; how programs find groups is in ``grouped``.

Tensor cores multiply numbers of 8 bits along rows of both factors. So the factors of a weight's
gradient are *turned*: the rows of a group are columns, which begin at a multiple of 16 (``places``
in ``kernels/eight_bits.py``). Between the end of a group and the next multiple all numbers are 0.

Shapes: s rows of all groups, g groups, k width of a factor, n rows of a matrix; o outputs, i inputs
and p places of turned factors.
"""

import triton
import triton.language as tl

from megatron.kernels.cuda.programs.eight_bits import eight_bits_of, raise_to_largest

_MULTIPLE = tl.constexpr(16)


@triton.jit
def _group_of(tile, ends_g, g, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """Return a tile's group, its first row, the group's end, the row's place, the group's last."""
    group = tl.arange(0, GROUPS)
    end = tl.load(ends_g + group, mask=group < g, other=0)
    begin = tl.load(ends_g + group - 1, mask=(group > 0) & (group < g), other=0)
    rows = tl.where(group < g, end - begin, 0)
    tiles = (rows + ROWS - 1) // ROWS
    after = tl.cumsum(tiles, 0)
    before = after - tiles
    # Counted in multiples, so that the compiler sees that places are multiples.
    wide = (rows + _MULTIPLE - 1) // _MULTIPLE
    last = tl.cumsum(wide, 0)
    is_own = (tile >= before) & (tile < after)
    done = tile - before
    own = tl.sum(tl.where(is_own, group, 0), 0)
    first = tl.sum(tl.where(is_own, begin + done * ROWS, 0), 0)
    place = tl.sum(tl.where(is_own, last - wide + done * (ROWS // _MULTIPLE), 0), 0)
    own_end = tl.sum(tl.where(is_own, end, 0), 0)
    own_last = tl.sum(tl.where(is_own, last, 0), 0)
    return own, first, own_end, place * _MULTIPLE, own_last * _MULTIPLE


# Where the scales of a layer lie must not decide the form, as in ``eight_bits``.
@triton.jit(do_not_specialize=["seen_g", "scale_g"])
def quantise_groups(
    straight_sk,
    turned,
    seen_g,
    x_sk,
    scale_g,
    ends_g,
    g,
    k,
    p,
    MOST: tl.constexpr,
    E5M2: tl.constexpr,
    STRAIGHT: tl.constexpr,
    TURNED: tl.constexpr,
    APART: tl.constexpr,
    SEEN: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """As ``eight_bits.quantise``, with a scale and a largest magnitude for each group.

    ``APART``: groups are matrices of ``p`` rows, and each is turned by itself, [g, k, p]. Otherwise
    ``turned`` is [k, p].
    """
    group, first, end, place, last = _group_of(tl.program_id(0), ends_g, g, ROWS, GROUPS)
    if first < end:
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
        here = (row < end)[:, None] & (column < k)[None, :]
        source = row[:, None] * k + column[None, :]
        x = tl.load(x_sk + source, mask=here, other=0.0).to(tl.float32)
        if SEEN:
            raise_to_largest(seen_g + group, x)
        if STRAIGHT or TURNED:
            bits = eight_bits_of(x, tl.load(scale_g + group), MOST, E5M2)
            if STRAIGHT:
                tl.store(straight_sk + source, bits, mask=here)
            if TURNED:
                out = turned
                if APART:
                    place = first - group * p
                    last = p
                    out += group.to(tl.int64) * k * p
                to = (place + tl.arange(0, ROWS)).to(tl.int64)
                there = (column < k)[:, None] & (to < last)[None, :]
                tl.store(out + column[:, None] * p + to[None, :], tl.trans(bits), mask=there)


@triton.jit(do_not_specialize=["left_worth_g", "right_worth_g"])
def grouped_eight_bit_product(
    out_sn,
    left_sk,
    left_worth_g,
    right_gnk,
    right_worth_g,
    ends_g,
    g,
    n,
    k,
    QUICK: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Compute a tile of the result: rows of ``left`` times their group's transposed matrix.

    ``SHARED`` is as in ``grouped.grouped_product``. Tensor cores of Hopper add up in fewer bits
    than fp32 has; unless ``QUICK``, sums over ``DEPTH`` are added in fp32.
    """
    program = tl.program_id(0)
    columns = (n + COLUMNS - 1) // COLUMNS
    within = program % (SHARED * columns)
    tile = (program // (SHARED * columns)) * SHARED + within % SHARED
    group, first, end, _, _ = _group_of(tile, ends_g, g, ROWS, GROUPS)
    if first < end:
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        column = ((within // SHARED) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
        depth = tl.arange(0, DEPTH).to(tl.int64)
        left = left_sk + row[:, None] * k + depth[None, :]
        right = right_gnk + group.to(tl.int64) * n * k + column[None, :] * k + depth[:, None]
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for rest in range(k, 0, -DEPTH):
            inside = depth < rest
            own = tl.load(left, mask=(row < end)[:, None] & inside[None, :], other=0.0)
            matrix = tl.load(right, mask=inside[:, None] & (column < n)[None, :], other=0.0)
            if QUICK:
                total = tl.dot(own, matrix, total)
            else:
                total = tl.dot(own, matrix, total, max_num_imprecise_acc=DEPTH)
            left += DEPTH
            right += DEPTH
        total = total * tl.load(left_worth_g + group) * tl.load(right_worth_g + group)
        to = row[:, None] * n + column[None, :]
        here = (row < end)[:, None] & (column < n)[None, :]
        tl.store(out_sn + to, total.to(out_sn.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["grad_worth_g", "x_worth_g"])
def grouped_eight_bit_weight_product(
    out_goi,
    grad_op,
    grad_worth_g,
    x_ip,
    x_worth_g,
    ends_g,
    g,
    o,
    i,
    p,
    ADDS: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Form a tile of ``grad.T @ x`` of a group's rows, or add it to a sum.

    A group without rows gets zeros, or leaves the sum as it is.
    """
    own = tl.program_id(1)
    group = tl.arange(0, GROUPS)
    end = tl.load(ends_g + group, mask=group < g, other=0)
    begin = tl.load(ends_g + group - 1, mask=(group > 0) & (group < g), other=0)
    rows = tl.where(group <= own, end - begin, 0)
    wide = (rows + _MULTIPLE - 1) // _MULTIPLE  # in multiples, as in ``_group_of``
    last = tl.sum(wide, 0) * _MULTIPLE
    first = tl.sum(tl.where(group < own, wide, 0), 0) * _MULTIPLE
    columns = (i + COLUMNS - 1) // COLUMNS
    output = ((tl.program_id(0) // columns) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = ((tl.program_id(0) % columns) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    depth = tl.arange(0, DEPTH)
    grad = grad_op + output[:, None] * p + first + depth[None, :]
    x = x_ip + column[None, :] * p + first + depth[:, None]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for rest in range(last - first, 0, -DEPTH):
        inside = depth < rest
        own_grad = tl.load(grad, mask=(output < o)[:, None] & inside[None, :], other=0.0)
        own_x = tl.load(x, mask=inside[:, None] & (column < i)[None, :], other=0.0)
        total = tl.dot(own_grad, own_x, total, max_num_imprecise_acc=DEPTH)
        grad += DEPTH
        x += DEPTH
    total = total * tl.load(grad_worth_g + own) * tl.load(x_worth_g + own)
    here = (output < o)[:, None] & (column < i)[None, :]
    out = out_goi + own.to(tl.int64) * o * i + output[:, None] * i + column[None, :]
    if ADDS:
        here = here & (first < last)
        total += tl.load(out, mask=here, other=0.0).to(tl.float32)
    tl.store(out, total.to(out_goi.dtype.element_ty), mask=here)
