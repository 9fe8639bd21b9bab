"""Triton programs that sort choices by their experts, and copy and add rows by the result.

The sort is by counting: one program counts how often a block of choices names each expert, and once
these counts are added up, another program puts every choice into its slot. Both are stable, so the
order is the same in every run.

Shapes: n tokens, k choices of a token, r = n k slots, g experts, b blocks of choices, h width of a
row.
"""

import triton
import triton.language as tl


@triton.jit
def count_choices(counts_gb, chosen_r, r, g, b, BLOCK: tl.constexpr, GROUPS: tl.constexpr):
    """Count how often a block of choices names each expert."""
    block = tl.program_id(0)
    place = block * BLOCK + tl.arange(0, BLOCK)
    chosen = tl.load(chosen_r + place, mask=place < r, other=-1).to(tl.int32)
    for first in range(0, g, GROUPS):
        group = first + tl.arange(0, GROUPS)
        counts = tl.sum((group[:, None] == chosen[None, :]).to(tl.int32), 1)
        tl.store(counts_gb + group * b + block, counts, mask=group < g)


@triton.jit
def place_choices(
    choice_r,
    slot_r,
    ends_g,
    sums_gb,
    counts_gb,
    chosen_r,
    r,
    g,
    b,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Write the slot of every choice, and the choice of every slot.

    ``sums`` has the sums of ``counts`` so far, in the order in which ``counts`` lies in memory.
    """
    block = tl.program_id(0)
    within = tl.arange(0, BLOCK)
    place = block * BLOCK + within
    inside = place < r
    chosen = tl.load(chosen_r + place, mask=inside, other=-1).to(tl.int32)
    is_before = (chosen[:, None] == chosen[None, :]) & (within[None, :] < within[:, None])
    before = tl.sum(is_before.to(tl.int32), 1)
    entry = chosen * b + block
    end = tl.load(sums_gb + entry, mask=inside, other=0)
    slot = end - tl.load(counts_gb + entry, mask=inside, other=0) + before
    tl.store(slot_r + place, slot.to(tl.int64), mask=inside)
    tl.store(choice_r + slot, place.to(tl.int64), mask=inside)
    if block == 0:
        group = tl.arange(0, GROUPS)
        ends = tl.load(sums_gb + (group + 1) * b - 1, mask=group < g, other=0)
        tl.store(ends_g + group, ends, mask=group < g)


@triton.jit
def spread(out_rh, x_nh, choice_r, k, h, BLOCK: tl.constexpr):
    """Copy the token of every slot."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < h
    token = tl.load(choice_r + row) // k
    x = tl.load(x_nh + token * h + channel, mask=inside, other=0.0)
    tl.store(out_rh + row * h + channel, x, mask=inside)


@triton.jit
def join(out_nh, y_rh, slot_nk, r, k, h, BLOCK: tl.constexpr):
    """Add up the slots of every token in fp32, in the order of its choices.

    A choice may be without a slot.
    """
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < h
    total = tl.zeros([BLOCK], tl.float32)
    for choice in range(0, k):
        slot = tl.load(slot_nk + row * k + choice)
        here = inside & (slot < r)
        total += tl.load(y_rh + slot * h + channel, mask=here, other=0.0).to(tl.float32)
    tl.store(out_nh + row * h + channel, total.to(out_nh.dtype.element_ty), mask=inside)
