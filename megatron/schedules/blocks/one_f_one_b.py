"""1F1B (PipeDream-flush, arXiv 2104.04473): each microbatch goes down and up without a pause.

Rank i holds at most p - i microbatches: stage i holds a microbatch from time i to 3p - 2i, and a
new one comes every three units (one unit for F, two for B).
"""

from megatron.schedules.blocks.block import Block, Slot


def one_f_one_b(ranks: int) -> Block:
    """Return the 1F1B block of ``ranks`` stages with F = 1 and B (weights included) = 2."""
    # B starts at i + 1 modulo 3, so it fills the two units that F leaves.
    rows = tuple((Slot(i, 1, "F"), Slot(ranks + 2 * (ranks - 1 - i), 2, "B")) for i in range(ranks))
    return Block(rows, tuple((i, 0) for i in range(ranks)), interval=3)
