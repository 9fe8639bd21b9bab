"""Triton programs of C1 and T: they merge statistics, and form gradients, except the products.

A program on a matrix [n, h] works on some channels of one token. Offsets into matrices have 64
bits. Arithmetic is fp32.

Shapes: v rows of the shard, n tokens, h hidden size, p shards.
"""

import triton
import triton.language as tl

from megatron.kernels.cuda.programs.softmax import LOWEST, slope_of


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
        # The derivative of lse is the softmax, so z lse² adds 2 z lse softmax.
        factor *= 1.0 + 2.0 * z_loss * (maximum + tl.log(total))
    # exp(m' - m): the exponentials are relative to the shard's own maximum m' (section 4).
    return factor * tl.exp(tl.load(shift_n + token) - maximum)


@triton.jit
def input_gradient(
    statistics_p4n,
    merged_4n,
    maximum_n,
    sum_n,
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
    MERGES: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Scale A by the merged statistics, and subtract the targets' rows of M.

    With MERGES it is C1 of Algorithm 2, which merges the statistics of all shards before; else T of
    Algorithm 1, with the maximum and the sum that are merged. With SPREAD also ``spread`` times
    ``spread_nh`` is subtracted, the sum of all rows, which has one row for all tokens unless logits
    are capped.
    """
    token = tl.program_id(0)
    if MERGES:
        maximum, total = _merged(statistics_p4n, merged_4n, token, p, n, RANKS)
    else:
        maximum, total = tl.load(maximum_n + token), tl.load(sum_n + token)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < h
    weight = tl.load(weight_n + token)
    factor = _softmax_factor(token, weight, shift_n, maximum, total, z_loss, Z_LOSS)
    place = token.to(tl.int64) * h + channel
    value = factor * tl.load(raw_nh + place, mask=inside, other=0.0)
    target = tl.load(targets_n + token) - first_row
    here = tl.where((target >= 0) & (target < v), h, 0)  # channels of a row of M that is here
    row = tl.load(weight_vh + target * h + channel, mask=channel < here, other=0.0).to(tl.float32)
    slope = slope_of(tl.load(target_logits_n + token), cap, CAPPED)
    value -= weight * pull * slope * row
    if SPREAD:
        from_row = channel
        if CAPPED:
            from_row = place
        value -= weight * spread * tl.load(spread_nh + from_row, mask=inside, other=0.0)
    tl.store(gradient_nh + place, value.to(gradient_nh.dtype.element_ty), mask=inside)


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
    """T: scale H, so that its product with the exponentials is the gradient's softmax part."""
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
    """T: subtract every token's row of H from its target's row; several may have the same."""
    token = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(targets_n + token) - first_row
    if (target >= 0) & (target < v):
        inside = channel < h
        slope = slope_of(tl.load(target_logits_n + token), cap, CAPPED)
        factor = tl.load(weight_n + token) * pull * slope
        place = token.to(tl.int64) * h + channel
        value = factor * tl.load(x_nh + place, mask=inside, other=0.0).to(tl.float32)
        # Relaxed is enough: no program reads the row before the kernel ends.
        tl.atomic_add(gradient_vh + target * h + channel, -value, mask=inside, sem="relaxed")
