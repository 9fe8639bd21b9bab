"""Triton programs of pass S: maxima of logits, exponentials in place, and sums of exponentials.

A matrix of logits is [v, n], vocabulary entries by tokens, contiguous. A program works on some
tokens (columns) and a span of rows. So it reads contiguous memory, and every token has only a few
partial results. Offsets into matrices have 64 bits. Arithmetic is fp32.

Shapes: v rows of the shard, n tokens.
"""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.4028234663852886e38)
"""The lowest fp32. It replaces a maximum of -inf, since the difference of two of these is NaN."""


@triton.jit
def _tanh(x):
    shrink = tl.exp(-2.0 * tl.abs(x))
    large = (1.0 - shrink) / (1.0 + shrink)
    square = x * x
    # 1 - exp(-2|x|) cancels for a small x; the series does not.
    small = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    return tl.where(tl.abs(x) < 0.1, small, tl.where(x < 0.0, -large, large))


@triton.jit
def _capped(logit, cap, CAPPED: tl.constexpr):
    if CAPPED:
        logit = cap * _tanh(logit / cap)
    return logit


@triton.jit
def slope_of(capped, cap, CAPPED: tl.constexpr):
    """Return the derivative of soft-capping, given the capped logit."""
    share = capped * 0.0
    if CAPPED:
        share = capped / cap
    return 1.0 - share * share


@triton.jit
def column_maxima(
    logits_vn,
    targets_n,
    maxima_kn,
    target_logits_n,
    v,
    n,
    first_row,
    cap,
    CAPPED: tl.constexpr,
    SPAN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Find the maximum of every column over every span of rows, and the logits of targets here."""
    part = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < n
    begin = part * SPAN
    most = tl.full([ROWS, COLUMNS], -float("inf"), tl.float32)
    for offset in range(0, tl.minimum(SPAN, v - begin), ROWS):
        row = begin + offset + tl.arange(0, ROWS)
        here = (row < v)[:, None] & inside[None, :]
        place = row.to(tl.int64)[:, None] * n + column[None, :]
        logit = tl.load(logits_vn + place, mask=here, other=-float("inf"))
        most = tl.maximum(most, logit.to(tl.float32))
    # The cap is monotonic, so capping the maximum is enough.
    found = _capped(tl.max(most, 0), cap, CAPPED)
    tl.store(maxima_kn + part.to(tl.int64) * n + column, found, mask=inside)

    target = tl.load(targets_n + column, mask=inside, other=-1) - first_row
    owned = inside & (target >= begin) & (target < begin + SPAN) & (target < v)
    logit = tl.load(logits_vn + target * n + column, mask=owned, other=0.0).to(tl.float32)
    # Tokens whose targets are on other shards keep the 0 of the state, as C1 adds shards up.
    tl.store(target_logits_n + column, _capped(logit, cap, CAPPED), mask=owned)


@triton.jit
def column_statistics(
    logits_vn,
    targets_n,
    maxima_kn,
    sums_kn,
    logit_sums_kn,
    target_logits_n,
    v,
    n,
    first_row,
    cap,
    CAPPED: tl.constexpr,
    LOGIT_SUMS: tl.constexpr,
    SPAN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Find ``column_maxima``, and sums of exponentials relative to them, reading logits once.

    Of its own maximum and the next logit a lane forms one exponential, exp(-|difference|). It
    shrinks the sum if the logit is larger, and is added to the sum if not.
    """
    part = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < n
    begin = part * SPAN
    # Not -inf: rows outside of the span are -inf, and the difference would be NaN.
    most = tl.full([ROWS, COLUMNS], LOWEST, tl.float32)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    logit_total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for offset in range(0, tl.minimum(SPAN, v - begin), ROWS):
        row = begin + offset + tl.arange(0, ROWS)
        here = (row < v)[:, None] & inside[None, :]
        place = row.to(tl.int64)[:, None] * n + column[None, :]
        logit = tl.load(logits_vn + place, mask=here, other=0.0).to(tl.float32)
        capped = tl.where(here, _capped(logit, cap, CAPPED), -float("inf"))
        more = capped - most
        share = tl.exp(-tl.abs(more))
        total = tl.where(more > 0.0, total * share + 1.0, total + share)
        most = tl.maximum(most, capped)
        if LOGIT_SUMS:
            logit_total += tl.where(here, capped, 0.0)
    highest = tl.max(most, 0)
    total = tl.sum(total * tl.exp(most - highest[None, :]), 0)
    place = part.to(tl.int64) * n + column
    tl.store(maxima_kn + place, highest, mask=inside)
    tl.store(sums_kn + place, total, mask=inside)
    if LOGIT_SUMS:
        tl.store(logit_sums_kn + place, tl.sum(logit_total, 0), mask=inside)

    target = tl.load(targets_n + column, mask=inside, other=-1) - first_row
    owned = inside & (target >= begin) & (target < begin + SPAN) & (target < v)
    logit = tl.load(logits_vn + target * n + column, mask=owned, other=0.0).to(tl.float32)
    tl.store(target_logits_n + column, _capped(logit, cap, CAPPED), mask=owned)


@triton.jit
def exponentials(
    logits_vn,
    shift_n,
    sums_kn,
    logit_sums_kn,
    slopes_vn,
    v,
    n,
    cap,
    CAPPED: tl.constexpr,
    SUMS: tl.constexpr,
    LOGIT_SUMS: tl.constexpr,
    SLOPES: tl.constexpr,
    SPAN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Turn logits into exponentials relative to ``shift_n``, times the derivative of soft-capping.

    Sums over every span of rows go to ``sums_kn`` (of exponentials, without the derivative) and
    ``logit_sums_kn`` (of capped logits), the derivative itself to ``slopes_vn``, as asked.
    """
    part = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < n
    shift = tl.maximum(tl.load(shift_n + column, mask=inside, other=0.0), LOWEST)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    logit_total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for offset in range(0, tl.minimum(SPAN, v - part * SPAN), ROWS):
        row = part * SPAN + offset + tl.arange(0, ROWS)
        here = (row < v)[:, None] & inside[None, :]
        place = row.to(tl.int64)[:, None] * n + column[None, :]
        logit = tl.load(logits_vn + place, mask=here, other=-float("inf")).to(tl.float32)
        capped = _capped(logit, cap, CAPPED)
        value = tl.exp(capped - shift[None, :])
        if CAPPED:  # what is outside is not -inf any more
            value = tl.where(here, value, 0.0)
        if SUMS:
            total += value
        if LOGIT_SUMS:
            logit_total += tl.where(here, capped, 0.0)
        if CAPPED:
            slope = slope_of(capped, cap, CAPPED)
            # After the sum: s has no slope of the cap, only the gradients have.
            value *= slope
            if SLOPES:
                tl.store(slopes_vn + place, slope.to(slopes_vn.dtype.element_ty), mask=here)
        tl.store(logits_vn + place, value.to(logits_vn.dtype.element_ty), mask=here)
    if SUMS:
        tl.store(sums_kn + part.to(tl.int64) * n + column, tl.sum(total, 0), mask=inside)
    if LOGIT_SUMS:
        found = tl.sum(logit_total, 0)
        tl.store(logit_sums_kn + part.to(tl.int64) * n + column, found, mask=inside)
