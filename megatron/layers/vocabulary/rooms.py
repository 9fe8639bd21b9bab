"""The rooms of an output layer: memory for exponentials or logits that microbatches share."""

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

    def take(self, fits: Callable[[Room], bool]) -> Room | None:
        """Return the last room that ``fits``, and drop the rooms behind it; ``None``: none fits."""
        while self._rooms:
            room = self._rooms.pop()
            if fits(room):
                return room
        return None

    def give(self, room: Room) -> None:
        """Let another microbatch take ``room``."""
        self._rooms.append(room)

    def drop(self) -> None:
        """Drop all rooms that wait."""
        self._rooms.clear()
