"""Whether this run has cases marked ``full``: then it tries more examples, and ranks get more time.

The environment carries the answer to the processes that run tests or play ranks.
"""

import os
from typing import Final

_VARIABLE: Final = "TESTS_IN_FULL"


def say_whether_full(*, full: bool) -> None:
    """Say whether this run has cases marked ``full``, before any test is imported."""
    os.environ[_VARIABLE] = "1" if full else ""


def is_full() -> bool:
    """Return whether this run has cases marked ``full``."""
    return bool(os.environ.get(_VARIABLE))
