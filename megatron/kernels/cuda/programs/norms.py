"""Triton programs of norms over the last dimension, and of the sums over rows that they need.

A program of the forward works on some whole rows. A program of the backward goes through a span of
rows and writes their part of the gradients of weight and bias. A second program adds up the parts
in a fixed order. Arithmetic is fp32.

Shapes: r rows, h their length, k spans of rows, j sums side by side.
"""

import triton
import triton.language as tl


@triton.jit
def norm(
    out_rh,
    sum_rh,
    statistics_2r,
    x_rh,
    part_rh,
    weight_h,
    bias_h,
    r,
    h,
    stride,
    epsilon,
    CENTRED: tl.constexpr,
    ADDS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Form the norm of ``x``, or ``sum = x + part`` and its norm; centred, it is LayerNorm.

    ``stride`` is that of the rows of ``x``; the others are dense.
    """
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    here = (row < r)[:, None] & (column < h)[None, :]
    place = row[:, None] * h + column[None, :]
    source = row[:, None] * stride + column[None, :]
    x = tl.load(x_rh + source, mask=here, other=0.0).to(tl.float32)
    if ADDS:
        x += tl.load(part_rh + place, mask=here, other=0.0).to(tl.float32)
        rounded = x.to(sum_rh.dtype.element_ty)
        tl.store(sum_rh + place, rounded, mask=here)
        x = rounded.to(tl.float32)  # the norm is that of the sum as others read it
    mean = tl.zeros([ROWS], tl.float32)
    if CENTRED:
        mean = tl.sum(x, 1) / h
        x = tl.where(here, x - mean[:, None], 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(x * x, 1) / h + epsilon)
    tl.store(statistics_2r + row, mean, mask=row < r)
    tl.store(statistics_2r + r + row, inverse, mask=row < r)
    out = x * inverse[:, None]
    out *= tl.load(weight_h + column, mask=column < h, other=0.0).to(tl.float32)[None, :]
    if CENTRED:
        out += tl.load(bias_h + column, mask=column < h, other=0.0).to(tl.float32)[None, :]
    tl.store(out_rh + place, out.to(out_rh.dtype.element_ty), mask=here)


@triton.jit
def norm_backward(
    x_grad_rh,
    partial_jkh,
    x_rh,
    weight_h,
    statistics_2r,
    grad_rh,
    stream_grad_rh,
    r,
    h,
    stride,
    span,
    CENTRED: tl.constexpr,
    STREAM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Form the gradient of a norm's input, and the span's part of weight's and bias's gradients.

    With ``STREAM`` the input went elsewhere too, and that gradient is added. While a program works
    on some rows, the next ``STAGES - 1`` times as many are on their way into shared memory.
    """
    part = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    weight = tl.load(weight_h + column, mask=column < h, other=0.0).to(tl.float32)[None, :]
    weight_grad = tl.zeros([ROWS, COLUMNS], tl.float32)
    bias_grad = tl.zeros([ROWS, COLUMNS], tl.float32)
    for offset in tl.range(0, span, ROWS, num_stages=STAGES):
        row = part * span + offset + tl.arange(0, ROWS)
        inside = (row < r) & (row < (part + 1) * span)
        here = inside[:, None] & (column < h)[None, :]
        place = row[:, None] * h + column[None, :]
        x = tl.load(x_rh + row[:, None] * stride + column[None, :], mask=here, other=0.0)
        grad = tl.load(grad_rh + place, mask=here, other=0.0).to(tl.float32)
        inverse = tl.load(statistics_2r + r + row, mask=inside, other=0.0)[:, None]
        normed = x.to(tl.float32)
        if CENTRED:
            mean = tl.load(statistics_2r + row, mask=inside, other=0.0)[:, None]
            normed -= mean  # also where there is no channel: the gradient there is 0
            bias_grad += grad
        normed *= inverse
        weight_grad += grad * normed
        grad *= weight
        # ∇x = (∇x̂ - x̂ mean(x̂ ∇x̂) - mean(∇x̂)) / deviation: x also enters by its deviation and
        # mean.
        along = grad - normed * (tl.sum(grad * normed, 1) / h)[:, None]
        if CENTRED:
            along -= (tl.sum(grad, 1) / h)[:, None]
        x_grad = along * inverse
        if STREAM:
            x_grad += tl.load(stream_grad_rh + place, mask=here, other=0.0).to(tl.float32)
        tl.store(x_grad_rh + place, x_grad.to(x_grad_rh.dtype.element_ty), mask=here)
    first = partial_jkh + part * h + column
    tl.store(first, tl.sum(weight_grad, 0), mask=column < h)
    if CENTRED:
        spans = tl.num_programs(0).to(tl.int64)
        tl.store(first + spans * h, tl.sum(bias_grad, 0), mask=column < h)


@triton.jit
def column_sums(sums_jh, partial_jkh, k, h, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Add up partial sums, always in the same order."""
    which = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, k, ROWS):
        row = first + tl.arange(0, ROWS)
        here = (row < k)[:, None] & (column < h)[None, :]
        place = (which * k + row)[:, None] * h + column[None, :]
        total += tl.load(partial_jkh + place, mask=here, other=0.0)
    sums = tl.sum(total, 0).to(sums_jh.dtype.element_ty)
    tl.store(sums_jh + which * h + column, sums, mask=column < h)
