"""Signals that ask a run to end; they are noted, and do not end the process."""

import signal
from types import FrameType


class ExitSignals:
    """A signal handler that only notes signals, so that they do not end the process.

    Attributes:
        received: signals that have come so far.
    """

    def __init__(self, names: tuple[str, ...] = ()) -> None:
        self.received: set[signal.Signals] = set()
        for name in names:
            signal.signal(signal.Signals[name], self)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Note a signal."""
        self.received.add(signal.Signals(number))


def was_terminated() -> bool:
    """Return whether this process has received a SIGTERM that ``ExitSignals`` has noted."""
    handler = signal.getsignal(signal.SIGTERM)
    return isinstance(handler, ExitSignals) and signal.SIGTERM in handler.received
