"""Insert the vocabulary passes S, T, IF and IB into any block (arXiv 2411.05288, section 5).

The input and output layers are split over all ranks, so each rank runs its share once a
microbatch, in time with the block:

* S follows the last stage's F as soon as the rank is between two passes; T follows S one interval
  later, when C1 is done, or two where E and the barrier of the sums come between (naive);
* every barrier holds the backwards back by one interval, in which its collective hides;
* IF runs one interval ahead of the first F, IB one interval behind the first stage's B, so that
  CIF and CIB hide too.

The inserted passes have no duration: they widen the interval of every rank alike, which the order
of the passes need not know.
"""

from dataclasses import replace
from math import ceil, floor

from megatron.schedules.blocks.block import Block, Slot


def with_vocabulary(block: Block, barriers: int) -> Block:
    """Return ``block`` with S, T, IF and IB on every rank.

    Args:
        block: any block with the vocabulary layers left out.
        barriers: 1 for Algorithm 2 (C1), 2 for Algorithm 1 (C1, and C2 after T), 3 for the naive
            order (C1, C2 after E, C3 after T).

    Raises:
        ValueError: if the block already has vocabulary passes, or for another count of barriers.
    """
    if block.barriers is not None:
        raise ValueError("the block already has vocabulary passes")
    if barriers not in (1, 2, 3):
        raise ValueError(f"the output layer has 1, 2 or 3 barriers, got {barriers}")
    last_forward = block.slot(len(block.stages) - 1, "F").end
    held = tuple(tuple(_hold_back(s, barriers * block.interval) for s in row) for row in block.rows)
    waiting = replace(block, rows=held, barriers=barriers)
    first_forward = waiting.slot(0, "F").start
    first_backward = waiting.slot(0, "B").end
    rows = []
    for row in held:
        s_time = _boundary_after(row, last_forward, block.interval)
        inserted = (
            Slot(s_time, 0, "S"),
            *([Slot(s_time + block.interval, 0, "E")] if barriers == 3 else []),
            Slot(s_time + block.interval * (2 if barriers == 3 else 1), 0, "T"),
            Slot(_boundary_before(row, first_forward - block.interval, block.interval), 0, "IF"),
            Slot(_boundary_after(row, first_backward + block.interval, block.interval), 0, "IB"),
        )
        rows.append(row + inserted)
    return replace(waiting, rows=tuple(rows))


def _hold_back(slot: Slot, delay: float) -> Slot:
    return slot if slot.kind == "F" else slot._replace(start=slot.start + delay)


def _boundary_after(row: tuple[Slot, ...], time: float, interval: float) -> float:
    """Return the first moment from ``time`` on at which no repetition of the row's slots runs."""
    while True:
        for slot in row:
            repeats = ceil((time - slot.end) / interval)  # the last one not ended before `time`
            if slot.start + repeats * interval < time < slot.end + repeats * interval:
                time = slot.end + repeats * interval
                break
        else:
            return time


def _boundary_before(row: tuple[Slot, ...], time: float, interval: float) -> float:
    """Return the last moment up to ``time`` at which no repetition of the row's slots runs."""
    while True:
        for slot in row:
            repeats = floor((time - slot.start) / interval)
            if slot.start + repeats * interval < time < slot.end + repeats * interval:
                time = slot.start + repeats * interval
                break
        else:
            return time
