"""Cut the microbatches of any block along their sequence into n slices.

(Seq1F1B, arXiv 2406.03488; SlimPipe, arXiv 2504.14519.) A block repeats its passes for every
microbatch. Cut into slices, it repeats them for every *unit*, a slice of a microbatch; an interval
is then n times shorter in real time. Attention of a slice reads the keys and values of all earlier
slices of its microbatch, so forwards take the slices in the order of the sequence, and backwards in
the reverse order. The backward of the last slice comes first, and the backward of slice 0 comes
last. So all backwards of a microbatch are held back until none is earlier than its place in the
block: by n - 1 intervals, and by more if chunks take turns in groups that are smaller than a
microbatch. A rank then holds n - 1 units more than the block without slices: 1F1B with p stages
holds (n + p - 1) / n microbatches, and idles for (p - 1) (F + B) / n.

IB is held back like B. The other vocabulary passes follow F, and are not held back. So
``with_slices`` comes after ``with_vocabulary`` and ``interlaced``, and each barrier costs an
interval of a slice.
"""

from dataclasses import replace
from math import lcm

from megatron.schedules.blocks.block import Block, Slot
from megatron.schedules.passes import DESCENDING_KINDS


def with_slices(block: Block, slices: int) -> Block:
    """Return ``block`` with every microbatch cut into ``slices``.

    Args:
        block: any block of whole microbatches, with its vocabulary passes. If it depends on the
            number of microbatches, it is made for the number of units.
        slices: n, at least 1.

    Raises:
        ValueError: if the microbatches of the block are cut already.
    """
    if block.slices != 1:
        raise ValueError(f"the block has {block.slices} slices already")
    delay = held_back(block, slices)

    def late(slot: Slot) -> Slot:
        return slot._replace(start=slot.start + delay * (slot.kind in DESCENDING_KINDS))

    rows = tuple(tuple(map(late, row)) for row in block.rows)
    return replace(block, rows=rows, slices=slices)


def held_back(block: Block, slices: int) -> float:
    """Return the time by which the backwards of ``block`` wait for the last slice's forward."""
    units = lcm(max(block.group, 1), slices)
    return max(
        block.offset(unit) - block.offset(unit + slices - 1 - 2 * (unit % slices))
        for unit in range(units)
    )


def units_in_flight(block: Block, slices: int) -> float:
    """Return how many more units than in ``block`` a rank holds, because of ``held_back``."""
    return held_back(block, slices) * max(block.group, 1) / block.period
