"""The memory of the host that a rank's copies use, which is pinned: a GPU copies from it by itself.

PyTorch's allocator of pinned memory takes a power of two of bytes for every tensor.
"""

from bisect import bisect_left, insort
from math import ceil

from megatron.schedules.lower import Program, Start
from megatron.schedules.needs import HOST_KINDS, Comm
from megatron.simulator.costs.rank_memory import RankMemory


def pinned(size: float) -> int:
    """Return the bytes that PyTorch takes for a pinned tensor of ``size`` bytes."""
    return 1 << (ceil(size) - 1).bit_length() if size else 0


class Rooms:
    """The sizes of the host's buffers for activations, which are reused and never given back.

    Attributes:
        bytes: of all buffers, whether they are in use or not.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._free: list[int] = []

    def take(self, size: int) -> int:
        """Return the bytes of a buffer for ``size`` bytes: the smallest free one, or a new one.

        New buffers have a power of two of bytes, as pinned memory has anyway. So the sizes of a
        mixture's activations, which always differ, share buffers.
        """
        at = bisect_left(self._free, size)
        if at < len(self._free):
            return self._free.pop(at)
        new = pinned(max(size, 1))
        self.bytes += new
        return new

    def give(self, room: int) -> None:
        """Let a buffer of ``room`` bytes be used again, by copies that follow in the lane."""
        insort(self._free, room)


def activations_on_host(program: Program, memory: RankMemory, rank: int) -> int:
    """Return the bytes of the host's buffers for the activations that ``rank`` copies there."""
    plan, rooms, taken = program.plan, Rooms(), dict[Comm, int]()
    for step in program.rows[rank]:
        if not isinstance(step, Start) or step.comm.kind not in HOST_KINDS:
            continue
        out = step.comm._replace(kind="O")
        if step.comm.kind == "L":
            rooms.give(taken.pop(out))
            continue
        count, n = memory.count.of_slice(out.slice, plan.slices)
        taken[out] = rooms.take(ceil(count.moved.get(plan.stages[out.stage][1], 0) / n))
    return rooms.bytes
