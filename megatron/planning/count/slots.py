"""Slots of captured passes on the ``meta`` device, where a graph is captured and never replayed."""

from contextlib import AbstractContextManager

from megatron.planning.count.recorder import Recorder
from megatron.runtime.replayed import Work


class CountedSlot:
    """The memory of a slot, which a recorder counts apart from the memory of all passes.

    Args:
        recorder: of the rank.
        name: kind of the slot.
    """

    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder, self._name = recorder, name

    def graph(self) -> "_CountedGraph":
        """See ``SlotMemory``."""
        return _CountedGraph(self._recorder, self._name)

    def lasting(self) -> AbstractContextManager[object]:
        """See ``SlotMemory``."""
        return self._recorder.in_slot(self._name, captured=False)


class _CountedGraph:
    """See ``Graph``: the capture is counted as the pass that it records."""

    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder, self._name = recorder, name

    def capture(self, work: Work) -> None:
        """See ``Graph``."""
        with self._recorder.in_slot(self._name, captured=True):
            work()

    def replay(self) -> None:
        """Do nothing: one microbatch is counted, for which every graph was just captured."""

    def reset(self) -> None:
        """See ``Graph``."""
