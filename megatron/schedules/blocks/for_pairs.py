"""Stretch any block until every F has a B of another microbatch right behind it.

``pairs.joined`` can join these two passes. Then each pass works while the tokens of the other pass
travel. A pair hands on both results when it ends. So a microbatch needs the time of a whole pair on
every stage, forward and back; without pairs it needs the time of one pass. The block keeps its way
through the stages and its groups. With several chunks it also keeps pauses between two stages that
are longer than a pair. The backwards come later than before, so ranks hold more microbatches:

* interleaved 1F1B and Hanayo, whose hops take as long as a pair anyway, hold one chunk more;
* ZB-V holds one microbatch more;
* with one chunk a rank, as in 1F1B and ZB-H1, a rank holds 2p microbatches in place of p. A rank
  starts one pair in each interval, so the time from F to B of a microbatch is a whole number of
  intervals. From a stage to the stage before, this time grows by at least the time of two pairs:
  one on the way forward, and one on the way back. Two pairs take longer than one interval, so the
  time grows by at least two intervals.

With one chunk a rank, every hop takes an interval, even if a pair is shorter because W is a pass of
its own. The time from F to B grows by two intervals a stage anyway, so these hops hold no more
microbatches. Hops as short as a pair of the block were tried. They are shorter than real hops: real
pairs take a larger share of an interval than pairs of the block, and the passes S and T of a split
vocabulary stand between real pairs. So the last stage was late, and every rank waited for it before
its S.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, count, takewhile

from megatron.schedules.blocks.block import Block, Slot
from megatron.schedules.passes import PassKind


class NoRoomError(ValueError):
    """A block has no time at which all repetitions of a pair could stand."""


def for_pairs(block: Block) -> Block:
    """Return ``block`` with each F followed at once by a B of another microbatch.

    Args:
        block: a block without vocabulary passes, in which every F takes the same time, every B too,
            and all times are whole numbers.

    Raises:
        NoRoomError: if there is no time for some pair, as in GIS with three chunks and more.
        ValueError: if the block has vocabulary passes.
    """
    if block.treatment.is_sharded:
        raise ValueError("the block has vocabulary passes: stretch it before they are inserted")
    return block if block.has_pairs else _Stretch(block).block()


class _Stretch:
    """Places the passes of a block anew, in the order in which a microbatch goes through them."""

    def __init__(self, block: Block) -> None:
        self._block = block
        self._forward = block.slot(0, "F").duration
        self._pair = self._forward + block.slot(0, "B").duration
        self._has_one_chunk = len(block.stages) == len(block.rows)
        self._rows: list[list[Slot]] = [[] for _ in block.rows]
        self._starts: list[set[float]] = [set() for _ in block.rows]
        self._joined: list[set[float]] = [set() for _ in block.rows]

    def block(self) -> Block:
        """Return the stretched block."""
        stages = range(len(self._block.stages))
        start = self._block.slot(0, "F").start
        for stage in stages:
            start = self._place_forward(stage, start + self._hop("F", stage - 1, stage))
        last = stages[-1]
        turn = self._own(last, "B") - self._own(last, "F") - self._forward
        start += max(turn, self._pair)
        for stage in reversed(stages):
            start = self._place_backward(stage, start + self._hop("B", stage + 1, stage))
        for rank, row in enumerate(self._block.rows):
            for slot in sorted(slot for slot in row if slot.kind == "W"):
                self._place_weights(rank, slot)
        return replace(self._block, rows=tuple(map(tuple, self._rows)), has_pairs=True)

    def _own(self, stage: int, kind: PassKind) -> float:
        return self._block.slot(stage, kind).start

    def _hop(self, kind: PassKind, stage: int, following: int) -> float:
        """Return the time that a pass has to wait for the same pass of the stage before."""
        if not 0 <= min(stage, following) <= max(stage, following) < len(self._block.stages):
            return 0.0
        if self._has_one_chunk:
            return self._block.interval
        return max(self._own(following, kind) - self._own(stage, kind), self._pair)

    def _repeats(self, start: float) -> set[float]:
        """Return the starts of all repetitions within a period."""
        block = self._block
        return {(start + i * block.interval) % block.period for i in range(max(block.group, 1))}

    def _is_free(self, rank: int, start: float, duration: float) -> bool:
        """Return whether no pair and no W of ``rank`` runs during a repetition of a new slot."""
        period = self._block.period
        busy = [(at, self._pair) for at in self._starts[rank]]
        for slot in self._rows[rank]:
            if slot.kind == "W":
                busy.extend((at, slot.duration) for at in self._repeats(slot.start))
        return all(
            (at - begun) % period >= taken and (begun - at) % period >= duration
            for at in self._repeats(start)
            for begun, taken in busy
        )

    def _in_step(self, stage: int, least: float) -> Iterator[float]:
        """Return the times from ``least`` on at which an F may start, without an end.

        Each time is as far from the first F of the rank as in the block, modulo interval. Only
        groups need this distance: barriers delay backwards by whole intervals, into the pairs of
        another chunk's group. Then these pairs have to begin in the same step.
        """
        rank, _ = self._block.stages[stage]
        if not self._block.group or not self._rows[rank]:
            return count(least)
        first, interval = self._rows[rank][0], self._block.interval
        own = self._block.slot(self._block.stages.index((rank, first.chunk)), "F").start
        in_step = first.start + self._own(stage, "F") - own
        return count(least + (in_step - least) % interval, interval)

    def _place_forward(self, stage: int, least: float) -> float:
        """Put a pair with the F of ``stage`` at the first free time; return this time."""
        rank, chunk = self._block.stages[stage]
        starts = self._in_step(stage, least)
        start = self._first(starts, lambda at: self._is_free(rank, at, self._pair))
        self._starts[rank] |= self._repeats(start)
        self._rows[rank].append(Slot(start, self._forward, "F", chunk))
        return start

    def _place_backward(self, stage: int, least: float) -> float:
        """Put the B of ``stage`` into the first pairs without a B; return when these start."""
        rank, _ = self._block.stages[stage]
        free = self._starts[rank] - self._joined[rank]
        start = self._first(count(least), lambda at: self._repeats(at) <= free)
        self._joined[rank] |= self._repeats(start)
        slot = self._block.slot(stage, "B")
        self._rows[rank].append(slot._replace(start=start + self._forward))
        return start

    def _place_weights(self, rank: int, slot: Slot) -> None:
        """Put a W at the first free time that is no sooner after its B than before."""
        own, backward = (
            next(s for s in rows[rank] if s.kind == "B" and s.chunk == slot.chunk)
            for rows in (self._block.rows, self._rows)
        )
        least = backward.end + slot.start - own.end
        start = self._first(count(least), lambda at: self._is_free(rank, at, slot.duration))
        self._rows[rank].append(slot._replace(start=start))

    def _first(self, starts: Iterator[float], fits: Callable[[float], bool]) -> float:
        """Return the first start that fits; after a period, all times are occupied as before."""
        first = next(starts)
        within = takewhile(lambda at: at < first + self._block.period, starts)
        for at in chain((first,), within):
            if fits(at):
                return at
        raise NoRoomError(f"no time in a period of {self._block.period:g} has room for a pair")
