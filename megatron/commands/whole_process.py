"""Settings of the whole process while a command runs; a caller within Python gets its own back."""

import gc
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reader_may_stop_early() -> Iterator[None]:
    """End the process without a word once the reader of its output has, as ``head`` does.

    Left on, this would also end a process whose worker processes die while it writes to them.
    """
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        yield
    finally:
        sys.stdout.flush()
        signal.signal(signal.SIGPIPE, before)


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Leave out the search for cycles, which takes long among millions of objects without any."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()
