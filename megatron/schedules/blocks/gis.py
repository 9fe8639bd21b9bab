"""GIS, GIS-H and PipeOffload (arXiv 2503.01328, section 3): interleaved 1F1B that holds less.

Stage c p + r is chunk c of rank r, as in interleaved 1F1B. B and W are apart, and F = B = W = 1, so
a chunk works for an interval of three units on a microbatch. From rank to rank F takes one and two
units by turns; B takes what remains of an interval. So a rank begins each backward one interval
later than the rank after it, where interleaved 1F1B needs two.

A microbatch enters chunk 0 of rank 0, and some intervals later every further chunk. It goes back
through the chunks at the same pace. A round of all p ranks takes half of p intervals at least.

* GIS: groups of p microbatches go through chunk 0, then chunk 1 and so on. A chunk follows the
  chunk before p intervals later, and rank 0 holds v p chunks.
* GIS-H: groups of half of p microbatches, rounded up. A rank holds about half as much, and ranks
  wait longer in the warm-up and the cool-down.
* PipeOffload: every microbatch goes through all chunks without groups, at the pace of GIS-H. So the
  chunks of a rank hold the less the later they come. The chunks of the first half, which hold three
  quarters of the memory, can wait on the host (``schedules.offload``).
"""

from collections.abc import Sequence

from megatron.schedules.blocks.block import Block, Slot


def gis(ranks: int, chunks: int) -> Block:
    """Return the block whose groups have as many microbatches as there are ranks."""
    return _in_groups(ranks, chunks, ranks)


def gis_h(ranks: int, chunks: int) -> Block:
    """Return the block whose groups are as small as the way through all ranks allows."""
    return _in_groups(ranks, chunks, half_of(ranks))


def pipeoffload(ranks: int, chunks: int) -> Block:
    """Return the block that repeats the way of GIS-H evenly, for every microbatch."""
    return _block(ranks, entries(ranks, chunks), 3 * chunks, 0)


def half_of(ranks: int) -> int:
    """Return the intervals in which a microbatch goes through a chunk of all ranks."""
    return -(-ranks // 2)


def entries(ranks: int, chunks: int) -> list[int]:
    """Return the interval in which a microbatch of PipeOffload enters each chunk of rank 0.

    A microbatch follows ``chunks`` intervals after the one before. So no two entries may be alike
    modulo ``chunks``: a chunk that would meet another one is entered in the next free interval.
    """
    found = [0]
    for _ in range(chunks - 1):
        at = found[-1] + half_of(ranks)
        while any((at - other) % chunks == 0 for other in found):
            at += 1
        found.append(at)
    return found


def _in_groups(ranks: int, chunks: int, group: int) -> Block:
    return _block(ranks, range(0, chunks * group, group), 3, group)


def _block(ranks: int, entered: Sequence[int], interval: int, group: int) -> Block:
    """Return the block whose microbatches enter the chunks of rank 0 in the given intervals."""
    rows = []
    for rank in range(ranks):
        down = 3 * rank // 2  # one unit and two units by turns
        turn = 3 * entered[-1] + down + 1 + 3 * (ranks - 1 - rank)
        slots = []
        for chunk, (there, back) in enumerate(zip(entered, reversed(entered), strict=True)):
            # Modulo 3 they start at down, down + 1 and down + 2, so they never meet.
            slots.append(Slot(3 * there + down, 1, "F", chunk))
            slots.append(Slot(turn + 3 * back, 1, "B", chunk))
            slots.append(Slot(turn + 3 * back + 1, 1, "W", chunk))
        rows.append(tuple(slots))
    stages = tuple((rank, chunk) for chunk in range(len(entered)) for rank in range(ranks))
    return Block(tuple(rows), stages, interval, group=group)
