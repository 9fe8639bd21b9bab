"""Says how far slow work is: a command that works in silence looks like one that hangs."""

import logging
import time
from collections.abc import Iterable, Iterator
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
