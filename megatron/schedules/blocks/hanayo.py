"""Hanayo (arXiv 2308.15762): a microbatch goes down and up the ranks in w waves.

A wave has two chunks per rank, so a rank has v = 2 w chunks. Even chunks go down the ranks, and odd
ones come back up, so a microbatch changes direction without leaving its rank. All p microbatches of
a group go through one wave before any of them enters the next wave, and a group starts all its
waves before the next group begins. Backwards take the waves in reverse order.

The unit of time is the F of a chunk. Each F of a microbatch starts three units after the F before
it, and each B three units after the B before it. The first B starts when the last F ends. So the
waves of a group, and the groups, follow one another without a gap on any rank. A rank holds p
microbatches as in 1F1B. If the number of microbatches is a multiple of p, each rank idles for
2 (p - 1) / w forwards of all its layers; in 1F1B it idles for 3 (p - 1). docs/how-it-works.md
compares this block with the published schedule.
"""

from megatron.schedules.blocks.block import Block, Slot


def hanayo(ranks: int, chunks: int) -> Block:
    """Return the block with F = 1 and B = 2, for an even number of ``chunks`` on each rank."""
    p, v = ranks, chunks
    stages = [(i if c % 2 == 0 else p - 1 - i, c) for c in range(v) for i in range(p)]
    last = p * v - 1
    rows: list[list[Slot]] = [[] for _ in range(p)]
    for stage, (rank, chunk) in enumerate(stages):
        # Of every three units F has the first, and B the other two.
        forward = Slot(3 * stage, 1, "F", chunk)
        backward = Slot(3 * last + 1 + 3 * (last - stage), 2, "B", chunk)
        rows[rank] += (forward, backward)
    return Block(tuple(map(tuple, rows)), tuple(stages), interval=6, group=p, chunks_per_turn=2)
