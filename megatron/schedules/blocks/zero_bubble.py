"""ZB-H1 and ZB-H2 (arXiv 2401.10241, section 2): weight gradients apart, filling the cool-down.

Both keep every rank's W so late that all ranks hold as much as the first: p microbatches, or 2p - 1
where the warm-up is filled with forwards as well.
"""

from megatron.schedules.blocks.block import Block, Slot


def zb_h1(ranks: int) -> Block:
    """Return the block that holds what 1F1B does: F = B = W = 1, W up to p - 1 intervals late."""
    p = ranks
    rows = tuple(
        (Slot(i, 1, "F"), Slot(3 * p - 2 - 2 * i, 1, "B"), Slot(3 * p - 1 + i, 1, "W"))
        for i in range(p)
    )
    return Block(rows, tuple((i, 0) for i in range(p)), interval=3)


def zb_h2(ranks: int) -> Block:
    """Return the block without a bubble where F = B = W: rank i runs 2 (p - i) - 1 F before B."""
    last = ranks - 1
    rows = tuple(
        (
            Slot(4 * i, 1, "F"),
            Slot(6 * last + 1 - 2 * i, 1, "B"),
            Slot(6 * last + 2 + 4 * i, 1, "W"),
        )
        for i in range(ranks)
    )
    return Block(rows, tuple((i, 0) for i in range(ranks)), interval=3)
