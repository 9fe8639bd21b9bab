"""GPipe (arXiv 1811.06965): all forwards, then all backwards; a rank holds all microbatches."""

from megatron.schedules.blocks.block import Block, Slot


def gpipe(ranks: int, microbatches: int) -> Block:
    """Return the GPipe block: backwards wait until the last microbatch's forwards are done.

    All forwards run before all backwards. So real forwards follow one another after 1 unit,
    although the block's interval is 3. To make up for this, a microbatch enters each next rank a
    whole interval later in the block. Then passes that wait for the last rank, such as vocabulary
    passes, come as many microbatches later in the block as in reality.
    """
    drained = microbatches + ranks - 1
    rows = tuple(
        (Slot(3 * i, 1, "F"), Slot(3 * (drained + ranks - 1 - i) + 1, 2, "B")) for i in range(ranks)
    )
    return Block(rows, tuple((i, 0) for i in range(ranks)), interval=3)
