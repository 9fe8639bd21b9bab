"""A building block: one microbatch's passes with their start times, repeated every ``interval``.

A schedule is a block and its unrolling (arXiv 2405.15362, section 2). The times of a block only
order the passes: the plan holds no times, and can be simulated with any costs.

In some schedules (interleaved, Hanayo) chunks take turns: a group of microbatches goes through one
chunk before any of them enters the next. The microbatches of a group follow one another after
``interval``, and groups follow one another after ``period``. A turn may cover several chunks: in
Hanayo it covers two, one down the ranks and one up again. If the last group is not full, its turns
may be shorter.

If microbatches are cut into slices (``with_slices``), slices take the place of microbatches: a
block repeats its passes for every slice of every microbatch, a *unit*.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

from megatron.schedules.passes import DESCENDING_KINDS, Pass, PassKind
from megatron.schedules.plan import Plan
from megatron.schedules.treatments import TREATMENTS, Treatment


class Slot(NamedTuple):
    """A pass of the block on one rank.

    Attributes:
        start: start time of microbatch 0, in the block's own unit; may be negative.
        duration: time that the pass occupies; 0 for a pass inserted between two others.
        kind: the kind of pass.
        chunk: the model chunk.
    """

    start: float
    duration: float
    kind: PassKind
    chunk: int = 0

    @property
    def end(self) -> float:
        """End time of microbatch 0."""
        return self.start + self.duration


@dataclass(frozen=True)
class Block:
    """One microbatch's passes on every rank.

    Attributes:
        rows: the slots of every rank.
        stages: (rank, chunk) of every stage in the order in which the data flows.
        interval: time after which the next microbatch of the group repeats the block.
        treatment: as in ``Plan``.
        group: microbatches of a group; 0 if chunks do not take turns.
        chunks_per_turn: chunks that a microbatch goes through in one turn.
        least_group: the fewest microbatches for which a turn of the last group may be as short as
            it has microbatches; 0: every turn is as long as that of a full group.
        has_pairs: whether an F may be joined with a B that follows at once (``schedules.pairs``).
            Then no vocabulary pass is put between the two.
        slices: slices of every microbatch (``with_slices``).

    Raises:
        ValueError: if repetitions of a rank's slots overlap.
    """

    rows: tuple[tuple[Slot, ...], ...]
    stages: tuple[tuple[int, int], ...]
    interval: float
    treatment: Treatment = TREATMENTS["none"]
    group: int = 0
    chunks_per_turn: int = 1
    has_pairs: bool = False
    slices: int = 1
    least_group: int = 0

    def __post_init__(self) -> None:
        period = self.period
        for rank, row in enumerate(self.rows):
            busy = sorted(
                ((slot.start + i * self.interval) % period, slot)
                for slot in row
                for i in range(max(self.group, 1))
                if slot.duration
            )
            following = [*busy[1:], *((start + period, slot) for start, slot in busy[:1])]
            for (start, slot), (later, other) in zip(busy, following, strict=True):
                if start + slot.duration > later:
                    raise ValueError(
                        f"rank {rank}: {slot.kind} at {slot.start:g} runs into {other.kind} at "
                        f"{other.start:g} when repeated every {self.interval:g}: move one of them "
                        "or make the interval longer"
                    )

    @cached_property
    def chunks(self) -> int:
        """Model chunks per rank v."""
        return 1 + max(chunk for _, chunk in self.stages)

    @cached_property
    def period(self) -> float:
        """Time after which the next group repeats the block."""
        return self.interval * max(self.group * self.turns, 1)

    @cached_property
    def turns(self) -> int:
        """Turns in which a group goes through all chunks of a rank."""
        return self.chunks // self.chunks_per_turn

    def offset(self, unit: int) -> float:
        """Return the time from the start of unit 0 to the start of ``unit``, in the same slot."""
        group, place = divmod(unit, max(self.group, 1))
        return group * self.period + place * self.interval

    def start(self, slot: Slot, unit: int) -> float:
        """Return when a unit's repetition of ``slot`` starts."""
        return slot.start + self.offset(unit)

    def units(self, slot: Slot, microbatches: int) -> Iterator[tuple[float, int, int]]:
        """Yield the start of ``slot``, the microbatch and the place in it, for every unit."""
        units = microbatches * self.slices
        rest = units % self.group if self.least_group else 0
        saved = (self.group - max(rest, self.least_group)) * self.interval if rest else 0.0
        early = self._turns_before(slot) * max(saved, 0.0)
        for unit in range(units):
            start = self.start(slot, unit) - early * (unit >= units - rest)
            yield start, *divmod(unit, self.slices)

    def _turns_before(self, slot: Slot) -> int:
        """Return how many turns of the way forward, or of the way back, are over before a slot."""
        turn = slot.chunk // self.chunks_per_turn
        match slot.kind:
            case "F":
                return turn
            case "B" | "W":
                return self.turns - 1 - turn
            case "IF":
                return 0
            case _:  # S and T follow the last F, and IB the last B
                return self.turns - 1

    def slot(self, stage: int, kind: PassKind) -> Slot:
        """Return the slot of ``kind`` on ``stage``."""
        rank, chunk = self.stages[stage]
        return next(s for s in self.rows[rank] if s.kind == kind and s.chunk == chunk)


_ORDER_AT_ONE_TIME: Final[tuple[PassKind, ...]] = ("T", "E", "S", "IB", "IF", "F", "B", "W")
"""Order of passes that start at the same moment. Inserted passes have no duration and go first. T
goes before S because it frees memory that S takes. E and S go before the others because barriers
wait for them."""
_ORDER_IN_STEP: Final[tuple[PassKind, ...]] = ("S", "T", "IB", "IF", "F", "B", "W")
"""The same order for a synchronous output layer, where T follows S."""


def unroll(block: Block, microbatches: int) -> Plan:
    """Repeat ``block`` for every microbatch and read off the order of the passes.

    Raises:
        ValueError: if ``microbatches`` is not positive.
    """
    if microbatches < 1:
        raise ValueError(f"an iteration needs at least 1 microbatch, got {microbatches}")
    order = _ORDER_IN_STEP if block.treatment.synchronous else _ORDER_AT_ONE_TIME
    last = block.slices - 1
    rows = []
    for slots in block.rows:
        timed: list[tuple[float, int, Pass]] = []
        for slot in slots:
            kind, chunk = slot.kind, slot.chunk
            place, descends = order.index(kind), kind in DESCENDING_KINDS
            timed += [
                (start, place, Pass(kind, i, chunk, last - s if descends else s))
                for start, i, s in block.units(slot, microbatches)
            ]
        timed.sort()
        rows.append(tuple(item for _, _, item in timed))
    return Plan(tuple(rows), block.stages, microbatches, block.treatment, slices=block.slices)
