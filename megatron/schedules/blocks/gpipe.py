"""GPipe (arXiv 1811.06965): all forwards, then all backwards; a rank holds all microbatches."""

from megatron.schedules.blocks.block import Block, Slot


def gpipe(ranks: int, microbatches: int) -> Block:
    """Return the GPipe block: backwards wait until the last microbatch has gone forward.

    Each half of the schedule runs without the other, so microbatches follow one another faster
    than the block's interval of 3 says: after 1 in the forwards. So a microbatch enters the next
    rank a whole interval later. Then what comes back from the last rank, as vocabulary passes do,
    stands as many microbatches behind as it really comes.
    """
    drained = microbatches + ranks - 1
    rows = tuple(
        (Slot(3 * i, 1, "F"), Slot(3 * (drained + ranks - 1 - i) + 1, 2, "B")) for i in range(ranks)
    )
    return Block(rows, tuple((i, 0) for i in range(ranks)), interval=3)
