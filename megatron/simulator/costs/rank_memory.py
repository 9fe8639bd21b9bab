"""The memory of a rank while it works through its row, from counts of its passes.

A count says how many bytes a pass leaves behind, frees, and needs while it runs. A rank always
holds some bytes; at any moment it also holds the bytes that all passes and communications so far
have left behind, and the bytes that the present pass needs.

If microbatches are cut into n slices, the counts of a training run and of the explorer have every
slice. Where a count has only whole microbatches, a pass of a slice counts as an n-th. The bytes
that slices need in addition are then missing: a buffer of gradients of keys and values, and the
part of the buffer of keys and values that later slices of the microbatch will fill.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron.schedules.lower import Instruction, Program, Run, Start, Wait
from megatron.schedules.needs import HOST_KINDS, REPLICA_KINDS
from megatron.schedules.passes import OfSlice, PassKind
from megatron.schedules.plan import Plan
from megatron.simulator.costs.count import NO_PASS, PassCount, RankCount
from megatron.simulator.costs.slot_memory import slot_bytes


class Rooms(Protocol):
    """Memory that units share, as the object that gives it to their passes does."""

    @property
    def bytes(self) -> float:
        """Bytes of all rooms, whether they are in use or not."""
        ...

    def take(self, size: float) -> None:
        """Take a room of ``size`` bytes for a unit."""
        ...

    def give(self, size: float) -> None:
        """Give the room of a unit back."""
        ...


class EqualRooms:
    """The rooms of units that are all equal, as in the closed form of a dense GPT.

    Attributes:
        bytes: of all rooms, whether they are in use or not.
    """

    def __init__(self) -> None:
        self.bytes = 0.0
        self._free = 0

    def take(self, size: float) -> None:
        """Take a room for a unit."""
        if self._free:
            self._free -= 1
        else:
            self.bytes += size

    def give(self, size: float) -> None:
        """Give the room of a unit back."""
        self._free += 1


@dataclass(frozen=True)
class RankMemory:
    """The memory of a pipeline rank.

    Attributes:
        count: the count of its passes and communications.
        static: bytes that are always held: parameters, gradients, optimizer state, copies for
            replicas.
        afterwards: bytes held after the last pass, in addition to those that are always held.
        communicators: number of the rank's NCCL communicators.
        outside: estimated bytes of the communicators. They belong to no tensor, so no peak counts
            them.
        on_host: bytes in the memory of the host: the optimizer's states, and slots for copies.
        workspaces: bytes that PyTorch lends the library of products, from the first product on.
        rooms: returns the rooms of passes before an iteration.
    """

    count: RankCount
    static: float
    afterwards: float = 0.0
    communicators: int = 0
    outside: float = 0.0
    on_host: float = 0.0
    workspaces: float = 0.0
    rooms: Callable[[], Rooms] = EqualRooms

    @property
    def always(self) -> float:
        """Bytes that are always held, without workspaces and buffers that are reused."""
        return self.static + self.count.held


def held(program: Program, memory: RankMemory, rank: int) -> Iterator[tuple[float, float]]:
    """Yield for every instruction of ``rank``, in order, the bytes held during it and after it."""
    now, slices = _at_rest(program.plan, memory, rank), program.plan.slices
    late = _late_waits(program.rows[rank])
    known: dict[object, tuple[float, float]] = {}
    for step in program.rows[rank]:
        item: OfSlice = step.passes[-1] if isinstance(step, Run) else step.comm
        waits_late = (item.microbatch, item.slice) in late
        key = (*_alike(step), waits_late)
        if key not in known:
            count, n = memory.count.of_slice(item.slice, slices)
            own = _count_of(program.plan, count, step)
            if waits_late:
                own = _with_late_wait(count, step, own)
            known[key] = own.peak / n, own.left / n
        peak, left = known[key]
        yield now + peak, now + left
        now += left


def _alike(step: Instruction) -> tuple[object, ...]:
    """Return a key that is equal for instructions of a rank with equal counts."""
    if isinstance(step, Run):
        own = step.item.kind, step.item.chunk, step.item.slice
        joined = step.joined
        return own if joined is None else (*own, joined.kind, joined.chunk, joined.slice)
    return isinstance(step, Start), step.comm.kind, step.comm.stage, step.comm.slice


def _count_of(plan: Plan, count: RankCount, step: Instruction) -> PassCount:
    """Return the count of an instruction, from the count of its slice."""
    if isinstance(step, Run):
        return _of_step(count, step)
    if step.comm.kind in REPLICA_KINDS:
        return NO_PASS  # ``static`` and ``afterwards`` count their copies
    if step.comm.kind in HOST_KINDS:
        return _of_copy(plan, count, step)
    known = count.begun if isinstance(step, Start) else count.ended
    return known.get((step.comm.kind, step.comm.stage), NO_PASS)


def _late_waits(row: Sequence[Instruction]) -> set[tuple[int, int]]:
    """Return the units, microbatch and slice, whose IB runs before the rank waits for their CIB.

    The rank that broadcasts the gradient of embeddings need not wait for it before IB. The later of
    the two frees the gradient. A count lets IB free it.
    """
    read, late = set[tuple[int, int]](), set[tuple[int, int]]()
    for step in row:
        if isinstance(step, Run) and step.passes[-1].kind == "IB":
            item = step.passes[-1]
            read.add((item.microbatch, item.slice))
        elif isinstance(step, Wait) and step.comm.kind == "CIB":
            late |= {(step.comm.microbatch, step.comm.slice)} & read
    return late


def _with_late_wait(count: RankCount, step: Instruction, own: PassCount) -> PassCount:
    """Return the count of a step of a unit of ``_late_waits``: the wait frees the bytes of IB."""
    freed = count.passes.get(("IB", 0), NO_PASS).left
    if isinstance(step, Run) and step.passes[-1].kind == "IB":
        return PassCount(left=own.left - freed, peak=own.peak)
    if isinstance(step, Wait) and step.comm.kind == "CIB":
        return PassCount(left=own.left + freed)
    return own


def _of_copy(plan: Plan, count: RankCount, step: Start | Wait) -> PassCount:
    """Return the count of a copy's begin or end: O frees at its end, L takes at its begin."""
    size = count.moved.get(plan.stages[step.comm.stage][1], 0)
    if step.comm.kind == "L" and isinstance(step, Start):
        return PassCount(left=size, peak=size)
    return PassCount(left=-size) if step.comm.kind == "O" and isinstance(step, Wait) else NO_PASS


def _of_step(count: RankCount, step: Run) -> PassCount:
    """Return the count of a pass, or of a pair, whose passes both hold their most at a time."""
    owns = [count.passes.get((item.kind, item.chunk), NO_PASS) for item in step.passes]
    if len(owns) == 1:
        return owns[0]
    return PassCount(left=sum(own.left for own in owns), peak=sum(own.peak for own in owns))


def peaks(program: Program, memories: Sequence[RankMemory]) -> list[float]:
    """Return for every rank the most bytes that it holds at any moment."""
    return [
        max(
            _at_rest(program.plan, memory, rank) + memory.afterwards,
            *(during for during, _ in held(program, memory, rank)),
        )
        for rank, memory in enumerate(memories)
    ]


def _at_rest(plan: Plan, memory: RankMemory, rank: int) -> float:
    """Return the bytes that a rank holds at all times, with its rooms and its slots of graphs."""
    rooms = _most_rooms(plan, memory, rank) if memory.count.rooms else 0.0
    return memory.always + memory.workspaces + rooms + slot_bytes(plan, memory.count, rank)


def _most_rooms(plan: Plan, memory: RankMemory, rank: int) -> float:
    """Return the most bytes of the rooms that a rank's passes take and give back."""
    count, rooms, most = memory.count, memory.rooms(), 0.0
    known: dict[tuple[PassKind, int, int], tuple[Sequence[float], Sequence[float]]] = {}
    for item in plan.rows[rank]:
        key = item.kind, item.chunk, item.slice
        if key not in known:
            of_slice, n = count.of_slice(item.slice, plan.slices)
            own = of_slice.passes.get(key[:2], NO_PASS)
            known[key] = [size / n for size in own.taken], [size / n for size in own.given]
        taken, given = known[key]
        for size in taken:
            rooms.take(size)
        most = max(most, rooms.bytes)
        for size in given:
            rooms.give(size)
    return most
