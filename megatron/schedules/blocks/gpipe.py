"""GPipe (arXiv 1811.06965): all forwards, then all backwards; a rank holds all microbatches."""

from megatron.schedules.blocks.block import Block, Slot


def gpipe(ranks: int, microbatches: int) -> Block:
    """Return the GPipe block: backwards wait until the last microbatch has gone forward."""
    drained = microbatches + ranks
    rows = tuple((Slot(i, 1, "F"), Slot(i + 1 + 3 * (drained - i), 2, "B")) for i in range(ranks))
    return Block(rows, tuple((i, 0) for i in range(ranks)), interval=3)
