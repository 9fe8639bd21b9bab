"""How many examples a property is tried on: a third by default, all of them in a full run.

Every run but CI's draws others, so that many default runs see what a full one sees.
"""

from harness.whole_run import is_full

_FEWEST = 5


def examples(most: int) -> int:
    """Return how many examples a property is tried on.

    Args:
        most: in a full run.
    """
    return most if is_full() else min(most, max(_FEWEST, most // 3))
