"""Interleaved 1F1B (arXiv 2104.04473, section 2.2): v chunks per rank, g microbatches at a time.

Stage c p + r is chunk c of rank r. Groups of g microbatches go through chunk 0, then chunk 1 and so
on; backwards take the chunks in reverse order. The warm-up of rank r has as many forwards as in
Megatron-LM, (v - 1) g + 2 (p - 1 - r). The two forwards for each later rank give the transfers in
both directions time.

The paper has g = p: a microbatch returns to rank 0 when the group has left it. In larger groups it
returns sooner than it is needed. So a message between the last rank and rank 0 may take g - p
intervals longer, and a rank holds (v - 1) (g - p) chunks more. Idle time stays as it is.
"""

from megatron.schedules.blocks.block import Block, Slot


def interleaved(ranks: int, chunks: int, group: int) -> Block:
    """Return the block of ``chunks`` chunks on each rank, with F = 1 and B = 2.

    Args:
        ranks: pipeline ranks p.
        chunks: model chunks v of a rank.
        group: microbatches g of a group, at least p.
    """
    p, v = ranks, chunks
    rows = []
    for r in range(p):
        slots = []
        for c in range(v):
            # F has the first unit of an interval, and B the other two.
            slots.append(Slot(3 * (c * group + r), 1, "F", c))
            first = 3 * ((v - 1) * group + 2 * (p - 1) - r) + 1  # of the last chunk
            slots.append(Slot(first + 3 * (v - 1 - c) * group, 2, "B", c))
        rows.append(tuple(slots))
    stages = tuple((r, c) for c in range(v) for r in range(p))
    return Block(tuple(rows), stages, interval=3, group=group, least_group=p)
