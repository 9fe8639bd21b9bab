"""The bytes of an output layer's rooms, asked of the object from which the layer takes them."""

from megatron.layers.vocabulary.rooms import FreeRooms


class RoomSizes:
    """The sizes of an output layer's rooms; microbatches or slices of equal sizes share them."""

    def __init__(self) -> None:
        self._free = FreeRooms[float]()
        self._taken: list[float] = []

    @property
    def bytes(self) -> float:
        """Bytes of all rooms, whether they are in use or not."""
        return sum(self._taken) + sum(self._free.rooms)

    def take(self, size: float) -> None:
        """Take a room of ``size`` bytes for a unit."""
        self._free.take(lambda room: room == size)
        self._taken.append(size)

    def give(self, size: float) -> None:
        """Give the room of a unit back."""
        self._taken.remove(size)
        self._free.give(size)
