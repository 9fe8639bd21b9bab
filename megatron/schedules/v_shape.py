"""The V shapes: chunk 0 goes down the ranks, chunk 1 comes back up (arXiv 2405.15362, section 3).

The first and the last stage are on rank 0, and what a rank holds of one chunk for long it holds of
the other briefly, so that all ranks hold the same. How far apart a microbatch's passes are decides
how much: p microbatches (ZB-V, arXiv 2401.10241, section 6), p/2 + 1 (V-Half) or p/3 + 2 (V-Min).
Times are of chunk passes, F = B = W = 1; a microbatch takes six of them on each rank.
"""

from megatron.schedules.block import Block, Slot

_PERIOD = 6


def zb_v(ranks: int) -> Block:
    """Return the block without a bubble where F = B = W, which holds as much as 1F1B."""
    last = ranks - 1
    return _block(
        tuple(
            (
                Slot(4 * i, 1, "F", 0),
                Slot(6 * last + 1 - 2 * i, 1, "F", 1),
                Slot(6 * last + 2 + 4 * i, 1, "B", 1),
                Slot(12 * last + 3 - 2 * i, 1, "B", 0),
            )
            for i in range(ranks)
        )
    )


def v_half(ranks: int) -> Block:
    """Return the block that holds half of what 1F1B does."""
    p = ranks
    shift = 3 if p % 2 == 0 else 0
    return _block(
        tuple(
            (
                Slot(2 * i, 1, "F", 0),
                Slot(3 * p - i - 2, 1, "F", 1),
                Slot(3 * p + shift + 2 * i - 1, 1, "B", 1),
                Slot(6 * p + shift - i - 2, 1, "B", 0),
            )
            for i in range(p)
        )
    )


def v_min(ranks: int) -> Block:
    """Return the block that holds a third of what 1F1B does."""
    p = ranks
    shift = 2 if p % 3 == 0 else 0
    return _block(
        tuple(
            (
                Slot(i, 1, "F", 0),
                Slot(2 * p - i - 1, 1, "F", 1),
                Slot(2 * p + shift + i, 1, "B", 1),
                Slot(4 * p + shift - i - 1, 1, "B", 0),
            )
            for i in range(p)
        )
    )


def _block(rows: tuple[tuple[Slot, ...], ...]) -> Block:
    """Add the weight gradients and say which stage is where."""
    ranks = len(rows)
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
