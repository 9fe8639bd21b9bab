"""How long the ranks of a test may take: ten times as long in a run with cases marked ``full``.

Such cases have more ranks, and run for hours beside whatever else the machine does. Who waits for a
default run wants to know of a hang within minutes.
"""

from harness.whole_run import is_full


def answer_seconds() -> float:
    """Return how long a call of ranks may take."""
    return 1200.0 if is_full() else 120.0


def collective_seconds() -> float:
    """Return how long a collective may wait for a rank."""
    return 600.0 if is_full() else 60.0
