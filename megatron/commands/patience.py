"""Says what a process does while it starts: it loads packages, plans, and waits for other ranks.

Python's own modules only, because it speaks while PyTorch is loaded.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from megatron.native.slow_work import while_it_lasts

TELL_FIRST: Final = 3.0
"""Seconds before the first line: a launcher has been loading for a while without a word."""

TELL_EVERY: Final = 8.0
"""Seconds between two lines."""


@contextmanager
def telling(
    doing: str,
    first: float = TELL_FIRST,
    tell_every: float = TELL_EVERY,
    environment: Mapping[str, str] = os.environ,
) -> Iterator[None]:
    """Print a line on stderr every few seconds while the block runs; only rank 0 of a job does.

    Args:
        doing: what the block does.
        first: seconds before the first line.
        tell_every: seconds between two lines.
        environment: names the rank; a process that no launcher has started is silent.
    """
    if environment.get("RANK") != "0":
        yield
        return

    def tell(seconds: float) -> None:
        print(f"starting: {seconds:.0f} s so far for {doing}", file=sys.stderr, flush=True)

    with while_it_lasts(tell, first, tell_every):
        yield
