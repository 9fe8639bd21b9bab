"""Triton programs of the output layer: softmax of a shard, its merge, what T does beside products.

A matrix of logits is [v, n], vocabulary entries by tokens, contiguous. A program has some tokens
(columns) and a span of rows, so that what it reads is contiguous, and what it finds per token is
one of few partial results. Offsets into matrices have 64 bits. Arithmetic is fp32.

Shapes: v rows of the shard, n tokens, h hidden size, p shards.
"""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.4028234663852886e38)
"""Of fp32: takes the place of a maximum of -inf, from which no difference could be taken."""


@triton.jit
def _tanh(x):
    shrink = tl.exp(-2.0 * tl.abs(x))
    large = (1.0 - shrink) / (1.0 + shrink)
    square = x * x
    small = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    return tl.where(tl.abs(x) < 0.1, small, tl.where(x < 0.0, -large, large))


@triton.jit
def _capped(logit, cap, CAPPED: tl.constexpr):
    if CAPPED:
        logit = cap * _tanh(logit / cap)
    return logit


@triton.jit
def _slope(capped, cap, CAPPED: tl.constexpr):
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
    found = _capped(tl.max(most, 0), cap, CAPPED)
    tl.store(maxima_kn + part.to(tl.int64) * n + column, found, mask=inside)

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
            slope = _slope(capped, cap, CAPPED)
            value *= slope
            if SLOPES:
                tl.store(slopes_vn + place, slope.to(slopes_vn.dtype.element_ty), mask=here)
        tl.store(logits_vn + place, value.to(logits_vn.dtype.element_ty), mask=here)
    if SUMS:
        tl.store(sums_kn + part.to(tl.int64) * n + column, tl.sum(total, 0), mask=inside)
    if LOGIT_SUMS:
        found = tl.sum(logit_total, 0)
        tl.store(logit_sums_kn + part.to(tl.int64) * n + column, found, mask=inside)


@triton.jit
def _merged(statistics_p4n, merged_4n, token, p, n, RANKS: tl.constexpr):
    """Return maximum and sum over all shards; for every token one program writes all statistics."""
    rank = tl.arange(0, RANKS)
    here = rank < p
    place = statistics_p4n + rank.to(tl.int64) * 4 * n + token
    maxima = tl.load(place, mask=here, other=-float("inf"))
    maximum = tl.max(maxima, 0)
    sums = tl.load(place + n, mask=here, other=0.0)
    total = tl.sum(sums * tl.exp(maxima - tl.maximum(maximum, LOWEST)), 0)
    if tl.program_id(1) == 0:
        tl.store(merged_4n + token, maximum)
        tl.store(merged_4n + n + token, total)
        targets = tl.load(place + 2 * n, mask=here, other=0.0)
        tl.store(merged_4n + 2 * n + token, tl.sum(targets, 0))
        logits = tl.load(place + 3 * n, mask=here, other=0.0)
        tl.store(merged_4n + 3 * n + token, tl.sum(logits, 0))
    return maximum, total


@triton.jit
def merge(statistics_p4n, merged_4n, p, n, RANKS: tl.constexpr):
    """C1: merge the statistics of all shards."""
    _merged(statistics_p4n, merged_4n, tl.program_id(0), p, n, RANKS)


@triton.jit
def _softmax_factor(token, weight, shift_n, maximum, total, z_loss, Z_LOSS: tl.constexpr):
    """Return g times the factor from an exponential relative to the shift to its gradient."""
    factor = weight / total
    if Z_LOSS:
        factor *= 1.0 + 2.0 * z_loss * (maximum + tl.log(total))
    return factor * tl.exp(tl.load(shift_n + token) - maximum)


@triton.jit
def _write_gradient(
    gradient_nh,
    raw_nh,
    weight_vh,
    spread_nh,
    weight_n,
    shift_n,
    maximum,
    total,
    targets_n,
    target_logits_n,
    v,
    h,
    first_row,
    pull,
    spread,
    z_loss,
    cap,
    CAPPED: tl.constexpr,
    SPREAD: tl.constexpr,
    Z_LOSS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Scale A by the merged statistics, and subtract the targets' rows of W.

    With SPREAD also ``spread`` times ``spread_nh``, the sum of all rows, which has one row for all
    tokens unless logits are capped.
    """
    token = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < h
    weight = tl.load(weight_n + token)
    factor = _softmax_factor(token, weight, shift_n, maximum, total, z_loss, Z_LOSS)
    place = token.to(tl.int64) * h + channel
    value = factor * tl.load(raw_nh + place, mask=inside, other=0.0)
    target = tl.load(targets_n + token) - first_row
    here = tl.where((target >= 0) & (target < v), h, 0)  # channels of a row of W that is here
    row = tl.load(weight_vh + target * h + channel, mask=channel < here, other=0.0).to(tl.float32)
    slope = _slope(tl.load(target_logits_n + token), cap, CAPPED)
    value -= weight * pull * slope * row
    if SPREAD:
        from_row = channel
        if CAPPED:
            from_row = place
        value -= weight * spread * tl.load(spread_nh + from_row, mask=inside, other=0.0)
    tl.store(gradient_nh + place, value.to(gradient_nh.dtype.element_ty), mask=inside)


@triton.jit
def merge_input_gradient(
    statistics_p4n,
    merged_4n,
    gradient_nh,
    raw_nh,
    weight_vh,
    spread_nh,
    weight_n,
    shift_n,
    targets_n,
    target_logits_n,
    p,
    n,
    v,
    h,
    first_row,
    pull,
    spread,
    z_loss,
    cap,
    CAPPED: tl.constexpr,
    SPREAD: tl.constexpr,
    Z_LOSS: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """C1 of Algorithm 2: merge the statistics of all shards, and finish the input gradient."""
    maximum, total = _merged(statistics_p4n, merged_4n, tl.program_id(0), p, n, RANKS)
    _write_gradient(
        gradient_nh,
        raw_nh,
        weight_vh,
        spread_nh,
        weight_n,
        shift_n,
        maximum,
        total,
        targets_n,
        target_logits_n,
        v,
        h,
        first_row,
        pull,
        spread,
        z_loss,
        cap,
        CAPPED,
        SPREAD,
        Z_LOSS,
        BLOCK,
    )


@triton.jit
def input_gradient(
    gradient_nh,
    raw_nh,
    weight_vh,
    spread_nh,
    weight_n,
    shift_n,
    maximum_n,
    sum_n,
    targets_n,
    target_logits_n,
    v,
    h,
    first_row,
    pull,
    spread,
    z_loss,
    cap,
    CAPPED: tl.constexpr,
    SPREAD: tl.constexpr,
    Z_LOSS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """T of Algorithm 1: the input gradient, from statistics that are merged."""
    token = tl.program_id(0)
    _write_gradient(
        gradient_nh,
        raw_nh,
        weight_vh,
        spread_nh,
        weight_n,
        shift_n,
        tl.load(maximum_n + token),
        tl.load(sum_n + token),
        targets_n,
        target_logits_n,
        v,
        h,
        first_row,
        pull,
        spread,
        z_loss,
        cap,
        CAPPED,
        SPREAD,
        Z_LOSS,
        BLOCK,
    )


@triton.jit
def scale_rows(
    scaled_nh,
    x_nh,
    weight_n,
    shift_n,
    maximum_n,
    sum_n,
    h,
    z_loss,
    Z_LOSS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """T: scale X, so that its product with the exponentials is the gradient's softmax part."""
    token = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < h
    maximum, total = tl.load(maximum_n + token), tl.load(sum_n + token)
    weight = tl.load(weight_n + token)
    factor = _softmax_factor(token, weight, shift_n, maximum, total, z_loss, Z_LOSS)
    place = token.to(tl.int64) * h + channel
    value = factor * tl.load(x_nh + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(scaled_nh + place, value.to(scaled_nh.dtype.element_ty), mask=inside)


@triton.jit
def subtract_targets(
    gradient_vh,
    x_nh,
    weight_n,
    targets_n,
    target_logits_n,
    v,
    h,
    first_row,
    pull,
    cap,
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """T: subtract every token's row of X from its target's row; several may have the same."""
    token = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(targets_n + token) - first_row
    if (target >= 0) & (target < v):
        inside = channel < h
        slope = _slope(tl.load(target_logits_n + token), cap, CAPPED)
        factor = tl.load(weight_n + token) * pull * slope
        place = token.to(tl.int64) * h + channel
        value = factor * tl.load(x_nh + place, mask=inside, other=0.0).to(tl.float32)
        tl.atomic_add(gradient_vh + target * h + channel, -value, mask=inside, sem="relaxed")
