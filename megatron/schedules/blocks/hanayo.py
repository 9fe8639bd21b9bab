"""Hanayo (arXiv 2308.15762): waves of w times down the ranks and up again, v = 2 w chunks a rank.

Even chunks go down the ranks, odd ones come back up, so that a microbatch stays where it is at
either end. Groups of p microbatches ride one wave, two chunks a rank, before the next; backwards
take the waves in the other order. Every pass starts three chunk units after the one before it: the
waves of a group then follow one another, and groups too, without a gap on any rank. A rank holds p
microbatches as in 1F1B, and the ranks idle for 2 (p - 1) / w forwards of a stage instead of
3 (p - 1), as long as the microbatches are a multiple of p.
"""

from megatron.schedules.blocks.block import Block, Slot


def hanayo(ranks: int, chunks: int) -> Block:
    """Return the block of ``chunks`` chunks on each rank, an even number, with F = 1 and B = 2."""
    p, v = ranks, chunks
    stages = [(i if c % 2 == 0 else p - 1 - i, c) for c in range(v) for i in range(p)]
    last = p * v - 1
    rows: list[list[Slot]] = [[] for _ in range(p)]
    for stage, (rank, chunk) in enumerate(stages):
        forward = Slot(3 * stage, 1, "F", chunk)
        backward = Slot(3 * last + 1 + 3 * (last - stage), 2, "B", chunk)
        rows[rank] += (forward, backward)
    return Block(tuple(map(tuple, rows)), tuple(stages), interval=6, group=p, chunks_per_turn=2)
