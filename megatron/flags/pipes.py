"""Ends a command in peace if nobody reads its output any longer, as after ``| head``."""

import atexit
import os
import sys
from types import TracebackType


def show(text: str) -> None:
    """Print a text; a reader who has seen enough of it and has left is no mistake."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        _silence()


def end_without_reader() -> None:
    """From now on, end the process without a traceback where a reader has left standard output.

    The exit status stays 1 where the command could not finish. Output in the buffer at the end of
    a finished command changes nothing. A second call changes nothing.
    """
    if sys.excepthook is not _tell:
        sys.excepthook = _tell
        atexit.register(_flush)


def _tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if isinstance(error, BrokenPipeError):
        _silence()
    else:
        sys.__excepthook__(kind, error, trace)


def _flush() -> None:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _silence()
    except ValueError:  # a test or a caller has closed it
        return


def _silence() -> None:
    """Send what is left of the output nowhere; Python writes it once more at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
