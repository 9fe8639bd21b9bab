"""1F1B-V (arXiv 2405.15362): the V shape with whole backwards; it holds two thirds of 1F1B.

Chunk 0 goes down the ranks, chunk 1 comes back up. The unit is the F of a chunk: F = 1 and B = 2,
so a microbatch takes six units on each rank. F starts on a stage as soon as F has ended on the
stage before. B also starts at once on two of three stages. On every third stage B waits three
units, because it would run into other passes there. The times from F to B of a rank's two chunks
add up to 8 p units, so every rank holds 2 p / 3 microbatches. The repeated block leaves gaps in the
warm-up and the cool-down. ``search/fill_gaps.py`` moves passes into these gaps, as the paper's
scheduler does.
"""

from megatron.schedules.blocks.block import Block, Slot


def one_f_one_b_v(ranks: int) -> Block:
    """Return the 1F1B-V block, with F = 1 and B (weights included) = 2."""
    p = ranks
    stages = [(i, 0) for i in range(p)] + [(i, 1) for i in reversed(range(p))]
    rows: list[list[Slot]] = [[] for _ in range(p)]
    # For a multiple of 3, 2p is 0 modulo 6: without the 3, rank 0's first B would run into an F.
    first_backward = 2 * p + (3 if p % 3 == 0 else 0)
    for stage, (rank, chunk) in enumerate(stages):
        hops = 2 * p - 1 - stage
        waits = ((1 - p) % 3 + hops) // 3
        backward = first_backward + 2 * hops + 3 * waits
        rows[rank] += (Slot(stage, 1, "F", chunk), Slot(backward, 2, "B", chunk))
    return Block(tuple(map(tuple, rows)), tuple(stages), interval=6)
