"""Says how far slow work is: a command that works in silence looks like one that hangs."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

_LOG = logging.getLogger(__name__)

T = TypeVar("T")

TELL_EVERY: Final = 3.0
"""Seconds between two lines."""

_AT_ONCE: Final = 4096
"""Steps after which the clock is read: reading it at every step would take as long as the step."""


def told(steps: Iterable[T], count: int, what: str) -> Iterator[T]:
    """Go through the steps of a piece of work; log every few seconds how many are done.

    Args:
        steps: the steps.
        count: number of steps.
        what: name of the work, for the log.
    """
    last = time.monotonic()
    for number, step in enumerate(steps):
        yield step
        if number % _AT_ONCE == 0 and time.monotonic() - last >= TELL_EVERY:
            last = time.monotonic()
            _LOG.warning("%s: %s of %s", what, f"{number:,}", f"{count:,}")


@contextmanager
def while_it_lasts(tell: Callable[[float], None], first: float, every: float) -> Iterator[None]:
    """Call ``tell`` with the seconds so far, in a thread of its own, while the block runs.

    Args:
        tell: says how long the work has lasted.
        first: seconds before the first call.
        every: seconds between two calls.
    """
    begin, ended = time.monotonic(), threading.Event()

    def go_on() -> None:
        pause = first
        while not ended.wait(pause):
            pause = every
            tell(time.monotonic() - begin)

    teller = threading.Thread(target=go_on, daemon=True)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join()
