"""The Triton program that scales a matrix and rounds it to 8 bits, straight and turned, in one go.

It rounds by integer arithmetic. So Triton's interpreter rounds as a GPU does; the interpreter's own
conversions would cut digits off.

Shapes: r rows, k numbers of a row.
"""

import triton
import triton.language as tl


@triton.jit
def _rounded(x, E5M2: tl.constexpr):
    """Return the bits of the nearest number of 8 bits, of two the even one; x is not too large.

    Above the subnormal numbers an fp32 loses the last digits of its mantissa, and the exponent its
    offset; a carry goes into the exponent. Below, all numbers have the same distance: that of fp32
    behind a certain power of two, to which x is added.
    """
    mantissa: tl.constexpr = 2 if E5M2 else 3
    bias: tl.constexpr = 15 if E5M2 else 7
    shift: tl.constexpr = 23 - mantissa
    half: tl.constexpr = (1 << (shift - 1)) - 1 - ((127 - bias) << 23)
    least_normal: tl.constexpr = 2.0 ** (1 - bias)
    behind: tl.constexpr = 2.0 ** (24 - bias - mantissa)
    behind_bits: tl.constexpr = (127 + 24 - bias - mantissa) << 23
    size = tl.abs(x)
    bits = size.to(tl.int32, bitcast=True)
    normal = (bits + half + ((bits >> shift) & 1)) >> shift
    subnormal = (size + behind).to(tl.int32, bitcast=True) - behind_bits
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return tl.where(size < least_normal, subnormal, normal) | sign


@triton.jit
def raise_to_largest(seen, x):
    """Raise ``seen`` to the largest magnitude of a tile.

    ``seen`` has the bits of a float that is not negative. As integers, such bits are in the order
    of the floats; infinity is above all numbers, and NaN above infinity. So an integer maximum
    finds the largest magnitude, in any order of the programs.
    """
    largest = tl.max(tl.max(tl.abs(x).to(tl.int32, bitcast=True), 1), 0)
    tl.atomic_max(seen, largest, mask=largest > tl.load(seen))


@triton.jit
def eight_bits_of(x, scale, MOST: tl.constexpr, E5M2: tl.constexpr):
    """Return ``x * scale`` in 8 bits, cut off at ``MOST``; infinity and NaN become NaN."""
    scaled = x * scale
    is_number = (tl.abs(x) < float("inf")) & (scaled == scaled)
    bits = _rounded(tl.minimum(tl.maximum(scaled, -MOST), MOST), E5M2)
    return tl.where(is_number, bits, 0x7F).to(tl.uint8)  # which is NaN in both types


# ``seen`` and ``scale`` of some layers lie at multiples of 16 bytes, for which Triton would compile
# another form. With delayed scaling it would do so as late as in the second iteration.
@triton.jit(do_not_specialize=["seen", "scale"])
def quantise(
    straight_rk,
    turned_kr,
    seen,
    x_rk,
    scale,
    r,
    k,
    stride,
    MOST: tl.constexpr,
    E5M2: tl.constexpr,
    STRAIGHT: tl.constexpr,
    TURNED: tl.constexpr,
    SEEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """See ``eight_bits_of`` and ``raise_to_largest``.

    ``stride`` is that of the rows of ``x``; results are dense.
    """
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    here = (row < r)[:, None] & (column < k)[None, :]
    source = row[:, None] * stride + column[None, :]
    x = tl.load(x_rk + source, mask=here, other=0.0).to(tl.float32)
    if SEEN:
        raise_to_largest(seen, x)
    if STRAIGHT or TURNED:
        bits = eight_bits_of(x, tl.load(scale), MOST, E5M2)
        if STRAIGHT:
            place = row[:, None] * k + column[None, :]
            tl.store(straight_rk + place, bits, mask=here)
        if TURNED:
            place = column[:, None] * r + row[None, :]
            there = (column < k)[:, None] & (row < r)[None, :]
            tl.store(turned_kr + place, tl.trans(bits), mask=there)
