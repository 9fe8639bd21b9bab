"""1F1B-V (arXiv 2405.15362): the V shape with whole backwards, two thirds of what 1F1B holds.

Chunk 0 goes down the ranks, chunk 1 comes back up. Times are of chunk passes, F = 1 and B = 2, so
that a microbatch takes six units on each rank. Forwards pass from stage to stage at once. So do two
backwards out of three; every third one waits three units, where it would run into the others. From
F to B that makes 8 p units on every rank, of its two chunks together, or 2 p / 3 microbatches.
"""

from megatron.schedules.blocks.block import Block, Slot


def one_f_one_b_v(ranks: int) -> Block:
    """Return the 1F1B-V block, with F = 1 and B (weights included) = 2."""
    p = ranks
    stages = [(i, 0) for i in range(p)] + [(i, 1) for i in reversed(range(p))]
    rows: list[list[Slot]] = [[] for _ in range(p)]
    first_backward = 2 * p + (3 if p % 3 == 0 else 0)
    for stage, (rank, chunk) in enumerate(stages):
        hops = 2 * p - 1 - stage
        waits = ((1 - p) % 3 + hops) // 3
        backward = first_backward + 2 * hops + 3 * waits
        rows[rank] += (Slot(stage, 1, "F", chunk), Slot(backward, 2, "B", chunk))
    return Block(tuple(map(tuple, rows)), tuple(stages), interval=6)
