"""When communications without a network end: one after the other, each after its time.

``tools/emulate.py`` delays real messages between processes by it, and the stand-ins of
``tools/gpu_sections/stand_ins.py`` delay communications of ranks that are not there.
"""

import time
from dataclasses import dataclass


@dataclass
class Queue:
    """Communications that end in the order in which they began.

    Attributes:
        free: time at which the last one has ended.
    """

    free: float = 0.0

    def through(self, ready: float, seconds: float) -> float:
        """Return the end of the next communication, which takes ``seconds`` from ``ready`` on."""
        self.free = max(ready, self.free) + seconds
        return self.free


def sleep_until(deadline: float, overshoot: float = 0.0) -> None:
    """Sleep until the clock (``time.perf_counter``) shows ``deadline``.

    Args:
        deadline: the time.
        overshoot: seconds by which a sleep takes too long on this machine.
    """
    remaining = deadline - time.perf_counter() - overshoot
    if remaining > 0:
        time.sleep(remaining)
    while time.perf_counter() < deadline:
        pass
