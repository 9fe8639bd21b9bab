"""The V shapes: chunk 0 goes down the ranks, chunk 1 comes back up (arXiv 2405.15362, section 3).

The first and the last stage are on rank 0. If a rank holds the activations of one chunk for long,
it holds the activations of its other chunk briefly. So all ranks hold the same amount. The amount
depends on the time between a microbatch's passes. It is p microbatches (ZB-V, arXiv 2401.10241,
section 6), (p + 2) / 2 (V-Half) or (p + 4) / 3 (V-Min), both rounded down. The unit is the pass of
a chunk, F = B = W = 1; a microbatch takes six units on each rank.
"""

from collections.abc import Callable

from megatron.schedules.blocks.block import Block, Slot
from megatron.schedules.passes import PassKind

_PERIOD = 6


def zb_v(ranks: int) -> Block:
    """Return the block that holds as much as 1F1B and, if F = B = W, has no bubble."""
    end = 6 * (ranks - 1)
    # Modulo 6 they start at 4i, 4i + 1, 4i + 2 and 4i + 3: two units are left for W.
    return _block(ranks, lambda i: (4 * i, end + 1 - 2 * i, end + 2 + 4 * i, 2 * end + 3 - 2 * i))


def v_half(ranks: int) -> Block:
    """Return the block that holds half as much as 1F1B."""
    up = 3 * ranks
    # For an even p, 3p is 0 modulo 6: without the 3, B0 would start together with F1.
    turn = up + (3 if ranks % 2 == 0 else 0)
    return _block(ranks, lambda i: (2 * i, up - i - 2, turn + 2 * i - 1, turn + up - i - 2))


def v_min(ranks: int) -> Block:
    """Return the block that holds a third as much as 1F1B."""
    up = 2 * ranks
    # For a multiple of 3, 2p is 0 modulo 6: without the 2, B1 would start together with F0.
    turn = up + (2 if ranks % 3 == 0 else 0)
    return _block(ranks, lambda i: (i, up - i - 1, turn + i, turn + up - i - 1))


def _block(ranks: int, starts: Callable[[int], tuple[int, int, int, int]]) -> Block:
    """Return the block in which F0, F1, B1 and B0 of every rank start at ``starts``."""
    passes: tuple[tuple[PassKind, int], ...] = (("F", 0), ("F", 1), ("B", 1), ("B", 0))
    rows = (
        tuple(
            Slot(start, 1, kind, chunk)
            for start, (kind, chunk) in zip(starts(rank), passes, strict=True)
        )
        for rank in range(ranks)
    )
    stages = [(i, 0) for i in range(ranks)] + [(i, 1) for i in reversed(range(ranks))]
    return Block(tuple(map(_with_weight_gradients, rows)), tuple(stages), _PERIOD)


def _with_weight_gradients(row: tuple[Slot, ...]) -> tuple[Slot, ...]:
    """Put each W into the first idle unit after its B."""
    slots = list(row)
    for backward in (slot for slot in row if slot.kind == "B"):
        taken = {slot.start % _PERIOD for slot in slots}
        start = next(
            t
            for t in range(int(backward.end), int(backward.end) + _PERIOD)
            if t % _PERIOD not in taken
        )
        slots.append(Slot(start, 1, "W", backward.chunk))
    return tuple(slots)
