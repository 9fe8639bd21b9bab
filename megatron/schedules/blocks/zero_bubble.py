"""ZB-H1 and ZB-H2 (arXiv 2401.10241, section 2): separate weight gradients fill the cool-down.

Both schedules delay W on the later ranks, so that all ranks hold as much as the first rank: p
microbatches in ZB-H1, and 2p - 1 in ZB-H2, which also fills the warm-up with forwards.
"""

from megatron.schedules.blocks.block import Block, Slot


def zb_h1(ranks: int) -> Block:
    """Return the ZB-H1 block with F = B = W = 1; it holds as much as 1F1B.

    W runs up to p - 1 intervals after its B.
    """
    p = ranks
    rows = tuple(
        # Modulo the interval of 3 they start at i, i + 1 and i + 2, so they never meet. On the last
        # rank B follows F at once.
        (Slot(i, 1, "F"), Slot(3 * p - 2 - 2 * i, 1, "B"), Slot(3 * p - 1 + i, 1, "W"))
        for i in range(p)
    )
    return Block(rows, tuple((i, 0) for i in range(p)), interval=3)


def zb_h2(ranks: int) -> Block:
    """Return the ZB-H2 block, which has no bubble if F = B = W.

    Rank i runs 2 (p - i) - 1 forwards before its first B.
    """
    last = ranks - 1
    rows = tuple(
        (
            # Modulo 3 again i, i + 1 and i + 2; on the last rank B follows F at once.
            Slot(4 * i, 1, "F"),
            Slot(6 * last + 1 - 2 * i, 1, "B"),
            Slot(6 * last + 2 + 4 * i, 1, "W"),
        )
        for i in range(ranks)
    )
    return Block(rows, tuple((i, 0) for i in range(ranks)), interval=3)
