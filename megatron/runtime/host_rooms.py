"""The memory of the host that a rank's copies use, which is pinned: a GPU copies from it by itself.

PyTorch's allocator of pinned memory takes a power of two of bytes for every tensor.
"""

from bisect import bisect_left, insort
from collections.abc import Callable
from math import ceil
from typing import Protocol, TypeVar

from megatron.schedules.lower import Program
from megatron.schedules.needs import Comm

Buffer = TypeVar("Buffer")


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


class TakesBuffers(Protocol[Buffer]):
    """Buffers that are reused: ``HostBuffers``, or only their sizes (``Rooms``)."""

    def take(self, size: int) -> Buffer:
        """Return a buffer of at least ``size`` bytes."""
        ...

    def give(self, buffer: Buffer) -> None:
        """Let a buffer be used again."""
        ...


def take_all(
    program: Program, rank: int, size_of: Callable[[Comm], int], buffers: TakesBuffers[Buffer]
) -> None:
    """Take and give back all buffers of an iteration, in the order in which the rank does it.

    Args:
        program: of a training iteration.
        rank: pipeline rank.
        size_of: returns the bytes that an O copies.
        buffers: of the host.
    """
    taken: dict[Comm, Buffer] = {}
    for comm in program.copies(rank):
        if comm.kind == "O":
            taken[comm] = buffers.take(size_of(comm))
        else:
            buffers.give(taken.pop(comm._replace(kind="O")))
