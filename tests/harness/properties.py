"""How many examples a property is tried on: a third by default, all of them in a full run.

Every run but CI's draws others, so that many default runs see what a full one sees.
"""

_FEWEST = 5
_in_full = False


def try_all(*, full: bool) -> None:
    """Say whether this run is a full one, before any test is imported."""
    global _in_full
    _in_full = full


def examples(most: int) -> int:
    """Return how many examples a property is tried on.

    Args:
        most: in a full run.
    """
    return most if _in_full else min(most, max(_FEWEST, most // 3))
