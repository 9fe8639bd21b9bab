"""The rooms of an output layer: memory for exponentials or logits that microbatches share.

The layer asks ``FreeRooms`` for a room. A plan asks the same object, by sizes alone, for the bytes
of all rooms that the passes of a rank take.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

Room = TypeVar("Room")


class FreeRooms(Generic[Room]):
    """Rooms that wait for another microbatch.

    The room that was given back last is taken first. If it does not fit, it is dropped, and the
    room before it is looked at. So rooms do not pile up when the size of microbatches changes.
    """

    def __init__(self) -> None:
        self._rooms: list[Room] = []

    @property
    def rooms(self) -> tuple[Room, ...]:
        """The rooms that wait."""
        return tuple(self._rooms)

    def take(self, fits: Callable[[Room], bool], make: Callable[[], Room]) -> Room:
        """Return the last room that ``fits``, and drop the rooms behind it; or ``make`` one."""
        while self._rooms:
            room = self._rooms.pop()
            if fits(room):
                return room
        return make()

    def give(self, room: Room) -> None:
        """Let another microbatch take ``room``."""
        self._rooms.append(room)


class RoomSizes:
    """The sizes of rooms; microbatches or slices of equal sizes share a room."""

    def __init__(self) -> None:
        self._free = FreeRooms[float]()
        self._taken: list[float] = []

    @property
    def bytes(self) -> float:
        """Bytes of all rooms, whether they are in use or not."""
        return sum(self._taken) + sum(self._free.rooms)

    def take(self, size: float) -> None:
        """Take a room of ``size`` bytes for a unit."""
        self._taken.append(self._free.take(lambda room: room == size, lambda: size))

    def give(self, size: float) -> None:
        """Give the room of a unit back."""
        self._taken.remove(size)
        self._free.give(size)
