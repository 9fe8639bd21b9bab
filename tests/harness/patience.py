"""How long the ranks of a test may take: ten times as long in a run with cases marked ``full``.

Such cases have more ranks, and run for hours beside whatever else the machine does. Who waits for a
default run wants to know of a hang within minutes.
"""

import os
from typing import Final

_VARIABLE: Final = "TESTS_PATIENCE"  # processes that play ranks inherit it


def be_patient(*, full: bool) -> None:
    """Say whether this run has cases marked ``full``, before any rank starts."""
    os.environ[_VARIABLE] = "10" if full else "1"


def answer_seconds() -> float:
    """Return how long a call of ranks may take."""
    return 120.0 * _patience()


def collective_seconds() -> float:
    """Return how long a collective may wait for a rank."""
    return 60.0 * _patience()


def _patience() -> float:
    return float(os.environ.get(_VARIABLE, "1"))
