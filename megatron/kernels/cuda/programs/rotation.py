"""The Triton program that turns pairs of channels of queries and keys. Arithmetic is fp32.

Shapes: b batch, s sequence, a heads, d channels of a head, p rotated pairs.
"""

import triton
import triton.language as tl


@triton.jit
def rotate(
    out_bsad,
    x_bsad,
    cos_bsp,
    sin_bsp,
    s,
    a,
    d,
    p,
    x_batch,
    x_token,
    x_head,
    angle_batch,
    angle_token,
    BACK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    OTHERS: tl.constexpr,
):
    """Turn the heads of a token by its angles, or back; channels in no pair are copied.

    ``x_*`` and ``angle_*`` are strides; the result is dense. ``PAIRS`` is a power of two that
    covers the p pairs. ``OTHERS`` is one that covers the channels in no pair, or 0 if there are
    none.
    """
    token = tl.program_id(0).to(tl.int64)
    batch, position = token // s, token % s
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, PAIRS)
    angle = batch * angle_batch + position * angle_token + pair
    cos = tl.load(cos_bsp + angle, mask=pair < p, other=0.0)[None, :]
    sin = tl.load(sin_bsp + angle, mask=pair < p, other=0.0)[None, :]
    if BACK:
        sin = -sin
    source = x_bsad + batch * x_batch + position * x_token + head[:, None] * x_head
    target = out_bsad + (token * a + head[:, None]) * d
    if INTERLEAVED:
        first, second = 2 * pair[None, :], 2 * pair[None, :] + 1
    else:
        first, second = pair[None, :], p + pair[None, :]
    here = (head < a)[:, None] & (pair < p)[None, :]
    x = tl.load(source + first, mask=here, other=0.0).to(tl.float32)
    y = tl.load(source + second, mask=here, other=0.0).to(tl.float32)
    kind = out_bsad.dtype.element_ty
    tl.store(target + first, (x * cos - y * sin).to(kind), mask=here)
    tl.store(target + second, (y * cos + x * sin).to(kind), mask=here)
    if OTHERS:
        channel = 2 * p + tl.arange(0, OTHERS)[None, :]
        here = (head < a)[:, None] & (channel < d)
        tl.store(target + channel, tl.load(source + channel, mask=here, other=0.0), mask=here)
