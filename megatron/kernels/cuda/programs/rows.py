"""The Triton program that adds rows to the rows of a sum which their ids name.

Shapes: v rows of a shard, n tokens, h hidden size.
"""

import triton
import triton.language as tl


@triton.jit
def add_rows(
    total_vh,
    sorted_n,
    order_n,
    x_nh,
    n,
    v,
    h,
    first_row,
    RUN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the rows of ``x`` with one id to the row of the sum; other programs leave at once.

    The ids are sorted, and ``order`` has the place that each had before. The program of an id's
    first place adds up all of the id's rows, ``RUN`` at a time and always in the same order.
    """
    begin = tl.program_id(0)
    own = tl.load(sorted_n + begin)
    before = tl.load(sorted_n + begin - 1, mask=begin > 0, other=0)
    row = own - first_row
    if (row >= 0) & (row < v) & ((own != before) | (begin == 0)):
        channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = channel < h
        to = total_vh + row * h + channel
        total = tl.load(to, mask=inside, other=0.0).to(tl.float32)
        place = begin + tl.arange(0, RUN)
        goes_on = 1
        while goes_on > 0:
            is_own = (tl.load(sorted_n + place, mask=place < n, other=0) == own) & (place < n)
            source = tl.load(order_n + place, mask=is_own, other=0)
            here = is_own[:, None] & inside[None, :]
            x = tl.load(x_nh + source[:, None] * h + channel[None, :], mask=here, other=0.0)
            total += tl.sum(x.to(tl.float32), 0)
            goes_on = tl.min(is_own.to(tl.int32), 0)
            place += RUN
        tl.store(to, total.to(total_vh.dtype.element_ty), mask=inside)
