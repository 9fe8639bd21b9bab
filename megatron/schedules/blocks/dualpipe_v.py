"""DualPipeV (github.com/deepseek-ai/DualPipe): a forward next to a backward, all the time.

DualPipe sends microbatches into the pipeline from both ends. DualPipeV is one half of it, cut in
the middle ("Cut-in-half", hackmd.io/@ufotalent/r1lVXsa9Jg): chunk 0 goes down the ranks, chunk 1
comes back up. In the steady state a rank runs F of chunk 0, B of chunk 1, F of chunk 1 and B of
chunk 0 in turn. So every F stands next to a B of another microbatch, and a plan may join the two
(``pairs.joined``). A result is then ready when its whole pair is done, so each stage follows the
stage before by the three units of a pair: F, B and W take 1 each.

A rank holds 2p + 1 chunks, one more than the pipeline has stages. The repeated block leaves gaps in
the warm-up and the cool-down. ``search/`` moves passes into these gaps: F of chunk 0 in the
warm-up, W in the cool-down, as in the published order.
"""

from megatron.schedules.blocks.block import Block, Slot

_PAIR = 3


def dualpipe_v(ranks: int) -> Block:
    """Return the DualPipeV block with F = B = W = 1; W follows its B at once."""
    p = ranks
    stages = [(i, 0) for i in range(p)] + [(i, 1) for i in reversed(range(p))]
    rows: list[list[Slot]] = [[] for _ in range(p)]
    turn = _PAIR * len(stages) + 1  # the first time after the last F at which a B is due
    for stage, (rank, chunk) in enumerate(stages):
        backward = turn + _PAIR * (len(stages) - 1 - stage)
        rows[rank] += (
            Slot(_PAIR * stage, 1, "F", chunk),
            Slot(backward, 1, "B", chunk),
            Slot(backward + 1, 1, "W", chunk),
        )
    return Block(tuple(map(tuple, rows)), tuple(stages), interval=2 * _PAIR, has_pairs=True)
