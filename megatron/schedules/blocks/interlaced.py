"""The interlaced treatment (OSDI'24, nnScaler): all ranks run the output layer together.

S and T run at the same moment on all ranks, as in tensor parallelism, and no rank works while their
collectives run. So all ranks must be between two passes when the last stage's F ends. In some
blocks (zero bubble, V shapes) all passes take one unit and follow one another without a gap; these
blocks meet the condition and stay as they are. The other blocks get new start times. An interval
then begins with the common output layer, and each rank runs its passes in an order within the
interval. Even and odd ranks have different orders, chosen so that a microbatch goes through
fastest; for 1F1B they are F B and B F. The time from F to B is then 1.5 p intervals instead of p.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from math import ceil, floor
from typing import NamedTuple

from megatron.schedules.blocks.block import Block, Slot
from megatron.schedules.passes import PassKind
from megatron.schedules.treatments import Treatment

Order = Mapping[tuple[PassKind, int], float]
"""(kind, chunk) -> its start within an interval; the output layer is at 0."""


Orders = Sequence[Order]
"""The orders of even and of odd ranks."""


class _Times(NamedTuple):
    """When F and B of one microbatch start, by stage."""

    forward: list[float]
    backward: list[float]

    @property
    def lifetime(self) -> float:
        """Time from F to B, summed over the stages."""
        return sum(self.backward) - sum(self.forward)


def interlaced(block: Block, treatment: Treatment) -> Block:
    """Return ``block`` with an output layer that all ranks run at the same moment.

    Args:
        block: any block without vocabulary passes.
        treatment: a synchronous treatment.

    Raises:
        ValueError: if the block already has vocabulary passes, or for another treatment.
    """
    if block.treatment.is_sharded:
        raise ValueError("the block already has vocabulary passes")
    if not treatment.synchronous:
        raise ValueError(f"{treatment.name} is not synchronous: take blocks.with_vocabulary")
    meeting = block.slot(len(block.stages) - 1, "F").end
    if not _meet(block, meeting):
        block, meeting = _anew(block), 0.0
    inserted = _vocabulary(block, meeting)
    rows = tuple(row + inserted for row in block.rows)
    return replace(block, rows=rows, treatment=treatment)


def _meet(block: Block, meeting: float) -> bool:
    """Whether all ranks are between two passes at the moment ``meeting`` of every interval."""
    return all(
        (slot.start - meeting) % block.interval + slot.duration <= block.interval
        for row in block.rows
        for slot in row
    )


def _anew(block: Block) -> Block:
    """Return a block of the same passes in which all ranks meet at every multiple of an interval.

    If backwards wait after the last forward in ``block`` (GPipe), they wait as long in the returned
    block.
    """
    orders = _best_orders(block)
    times = _times(block, orders)
    rows = []
    for rank, row in enumerate(block.rows):
        slots = [_moved(block, slot, rank, times) for slot in row if slot.kind != "W"]
        for gradient in (slot for slot in row if slot.kind == "W"):
            backward = next(s for s in slots if s.kind == "B" and s.chunk == gradient.chunk)
            start = _next(backward.end, _place(block, orders[rank % 2], "W", gradient.chunk), block)
            slots.append(gradient._replace(start=start))
        rows.append(tuple(slots))
    return replace(block, rows=tuple(rows))


def _best_orders(block: Block) -> Orders:
    """Return the orders of even and odd ranks, improved in turn until neither can be improved."""
    orders = list(_orders(block))
    pair = [orders[0]] * 2
    best = _times(block, pair).lifetime
    improved = True
    while improved:
        improved = False
        for parity in (0, 1):
            for order in orders:
                trial = [*pair]
                trial[parity] = order
                lifetime = _times(block, trial).lifetime
                if lifetime < best:
                    best, pair, improved = lifetime, trial, True
    return pair


def _orders(block: Block) -> Iterator[Order]:
    """Yield every order of a rank's passes within an interval."""
    lengths = {_key(block, slot.kind, slot.chunk): slot.duration for slot in block.rows[0]}
    seen = set()
    for keys in permutations(lengths):
        shape = tuple("W" if kind == "W" else (kind, chunk) for kind, chunk in keys)
        if shape not in seen:  # which chunk's W comes first does not matter
            seen.add(shape)
            starts, now = {}, 0.0
            for key in keys:
                starts[key] = now
                now += lengths[key]
            yield starts


def _key(block: Block, kind: PassKind, chunk: int) -> tuple[PassKind, int]:
    """Return the key of a pass in an ``Order``: chunks of different turns share one place."""
    return kind, (chunk % block.chunks_per_turn if block.group else chunk)


def _place(block: Block, order: Order, kind: PassKind, chunk: int) -> float:
    return order[_key(block, kind, chunk)]


def _times(block: Block, orders: Orders) -> _Times:
    """Return when one microbatch's passes start: each at the next place in its rank's order."""
    last = len(block.stages) - 1
    end, held_back = block.slot(last, "F").end, block.slot(last, "B").start
    forward = _chain(block, orders, "F", 0.0)
    done = forward[-1] + block.slot(last, "F").duration
    output = _next(done, 0.0, block)
    backward = _chain(block, orders, "B", max(output, done + held_back - end))
    return _Times(forward, backward[::-1])


def _chain(block: Block, orders: Orders, kind: PassKind, ready: float) -> list[float]:
    """Return the starts of F or B on all stages, in the order in which the data flows."""
    stages = range(len(block.stages))
    starts: list[float] = []
    turns: dict[tuple[int, int], tuple[int, float]] = {}
    for stage in stages if kind == "F" else reversed(stages):
        rank, chunk = block.stages[stage]
        start = _next(ready, _place(block, orders[rank % 2], kind, chunk), block)
        if block.group:  # a rank's chunks take turns, ``group`` microbatches apart
            turn, place = divmod(chunk, block.chunks_per_turn)
            first_turn, first = turns.setdefault((rank, place), (turn, start))
            start = first + abs(turn - first_turn) * block.group * block.interval
            assert start >= ready, "a group passes a chunk before its turn ends"
        starts.append(start)
        ready = start + block.slot(stage, kind).duration
    return starts


def _next(ready: float, place: float, block: Block) -> float:
    """Return the first moment, not before ``ready``, that is at ``place`` within an interval."""
    return place + ceil((ready - place) / block.interval) * block.interval


def _moved(block: Block, slot: Slot, rank: int, times: _Times) -> Slot:
    starts = times.forward if slot.kind == "F" else times.backward
    return slot._replace(start=starts[block.stages.index((rank, slot.chunk))])


def _vocabulary(block: Block, meeting: float) -> tuple[Slot, ...]:
    """Return S and T after the last F, IF before the first F and IB after the last B.

    All of them are at moments when all ranks are between two passes.
    """
    interval = block.interval
    output = _next(block.slot(len(block.stages) - 1, "F").end, meeting, block)
    before = floor((block.slot(0, "F").start - meeting) / interval) * interval
    return (
        Slot(output, 0, "S"),
        Slot(output, 0, "T"),
        Slot(meeting + before, 0, "IF"),
        Slot(_next(block.slot(0, "B").end, meeting, block), 0, "IB"),
    )
