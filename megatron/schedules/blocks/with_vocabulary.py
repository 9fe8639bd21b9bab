"""Insert the vocabulary passes S, T, IF and IB into any block (arXiv 2411.05288, section 5).

The input and output layers are split over all ranks, so each rank runs its share once per
microbatch:

* S follows the last stage's F as soon as the rank is between two passes, or a share of an interval
  later. Each further pass of the output layer follows one interval after the previous pass, when
  the barrier between the two is done;
* every barrier delays the backwards by one interval, in which other passes overlap its collective;
* IF runs one interval before the first F and IB one interval after the first stage's B, so that
  other passes overlap CIF and CIB too.

In a block with pairs, a pair counts as one pass: nothing is inserted between its F and its B, and
the output of its F exists when it ends.

The inserted passes have no duration here. In reality they lengthen the interval of all ranks alike,
which does not change the order of the passes.
"""

from dataclasses import replace
from math import ceil, floor

from megatron.schedules.blocks.block import Block, Slot
from megatron.schedules.treatments import Treatment


def with_vocabulary(block: Block, treatment: Treatment, late: float = 0.0) -> Block:
    """Return ``block`` with the passes of ``treatment`` on every rank.

    Args:
        block: any block without vocabulary passes.
        treatment: a treatment that splits the vocabulary and overlaps its collectives with other
            passes.
        late: share of an interval by which S is put off on all ranks except the last stage's. Real
            passes take other times than in the block, and messages take time, so the output of the
            last stage may arrive later than in the block. A rank whose S is not put off would then
            wait. The barrier after S has a whole interval, so S may use a part of this interval.

    Raises:
        ValueError: if the block already has vocabulary passes, or for another treatment.
    """
    if block.treatment.is_sharded:
        raise ValueError("the block already has vocabulary passes")
    if not treatment.is_sharded:
        raise ValueError(f"{treatment.name} has no vocabulary passes: leave the block as it is")
    if treatment.synchronous:
        raise ValueError(f"{treatment.name} overlaps nothing: take blocks.interlaced")
    # One more microbatch in flight for each interval: in 1F1B p + 2 with Algorithm 1, p + 1 with
    # Algorithm 2.
    delay = treatment.delay * block.interval
    held = tuple(tuple(_hold_back(slot, delay) for slot in row) for row in block.rows)
    waiting = replace(block, rows=held, treatment=treatment)
    rows = [_undivided(waiting, row) for row in held]
    last_rank, _ = block.stages[-1]
    last_forward = _boundary_after(
        rows[last_rank], waiting.slot(len(block.stages) - 1, "F").end, block.interval
    )
    first_forward = waiting.slot(0, "F").start
    first_backward = waiting.slot(0, "B").end
    treated = []
    for rank, row in enumerate(rows):
        waits = late * block.interval * (rank != last_rank)
        s_time = _boundary_after(row, last_forward + waits, block.interval)
        inserted = (
            *(
                Slot(s_time + i * block.interval, 0, kind)
                for i, kind in enumerate(treatment.output_passes)
            ),
            Slot(_boundary_before(row, first_forward - block.interval, block.interval), 0, "IF"),
            Slot(_boundary_after(row, first_backward + block.interval, block.interval), 0, "IB"),
        )
        treated.append(held[rank] + inserted)
    return replace(waiting, rows=tuple(treated))


def _hold_back(slot: Slot, delay: float) -> Slot:
    return slot if slot.kind == "F" else slot._replace(start=slot.start + delay)


def _undivided(block: Block, row: tuple[Slot, ...]) -> tuple[Slot, ...]:
    """Return a row in which an F and the B that may be joined with it are one slot."""
    if not block.has_pairs:
        return row

    def with_backward(slot: Slot) -> Slot:
        joined = (
            other.duration
            for other in row
            if slot.kind == "F"
            and other.kind == "B"
            and (other.start - slot.end) % block.interval == 0
        )
        return slot._replace(duration=slot.duration + max(joined, default=0.0))

    return tuple(with_backward(slot) for slot in row)


def _boundary_after(row: tuple[Slot, ...], time: float, interval: float) -> float:
    """Return the first moment not before ``time`` at which no repetition of a slot runs."""
    while True:
        for slot in row:
            repeats = ceil((time - slot.end) / interval)  # first repetition with end >= `time`
            if slot.start + repeats * interval < time < slot.end + repeats * interval:
                time = slot.end + repeats * interval
                break
        else:
            return time


def _boundary_before(row: tuple[Slot, ...], time: float, interval: float) -> float:
    """Return the last moment not after ``time`` at which no repetition of a slot runs."""
    while True:
        for slot in row:
            repeats = floor((time - slot.start) / interval)
            if slot.start + repeats * interval < time < slot.end + repeats * interval:
                time = slot.start + repeats * interval
                break
        else:
            return time
