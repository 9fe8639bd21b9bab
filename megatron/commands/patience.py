"""Says what a process does while it starts: it loads packages, plans, and waits for other ranks.

Python's own modules only, because it speaks while PyTorch is loaded.
"""

import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import monotonic
from typing import Final

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
    begin, ended = monotonic(), threading.Event()

    def tell() -> None:
        pause = first
        while not ended.wait(pause):
            pause = tell_every
            line = f"starting: {monotonic() - begin:.0f} s so far for {doing}"
            print(line, file=sys.stderr, flush=True)

    teller = threading.Thread(target=tell, daemon=True)
    if environment.get("RANK") == "0":
        teller.start()
    try:
        yield
    finally:
        ended.set()
        if teller.ident is not None:
            teller.join()
