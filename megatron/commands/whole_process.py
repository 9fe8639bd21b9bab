"""Settings of the whole process while a command runs. Afterwards the old settings are back."""

import gc
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reader_may_stop_early() -> Iterator[None]:
    """End the process silently if the reader of its output ends first, as ``head`` does.

    The setting ends with the ``with`` block. Otherwise a worker process that dies while this
    process writes to it would end this process too.
    """
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        yield
    finally:
        sys.stdout.flush()
        signal.signal(signal.SIGPIPE, before)


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Turn off Python's search for cycles, which takes long among millions of objects."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()
