"""The rooms that an output layer takes and gives back, as its count lists them."""

from collections.abc import Callable, Sequence

from torch import Tensor

from megatron.layers.vocabulary.rooms import FreeRooms
from megatron.planning.count.recorder import Recorder


class ListedRooms(FreeRooms[Sequence[Tensor]]):
    """Makes a room for every unit, and lists its bytes with the pass that takes or gives it.

    How many rooms a rank needs, its plan of all microbatches decides.

    Args:
        recorder: records the passes.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def take(
        self, fits: Callable[[Sequence[Tensor]], bool], make: Callable[[], Sequence[Tensor]]
    ) -> Sequence[Tensor]:
        """See ``FreeRooms``."""
        return self._recorder.taking(make)

    def give(self, room: Sequence[Tensor]) -> None:
        """See ``FreeRooms``; no other unit takes it, so that each unit has the bytes of its own."""
        self._recorder.give(room)
