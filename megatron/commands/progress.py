"""Shows on a terminal how far a command is, or that it works; elsewhere it shows nothing."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, track

T = TypeVar("T")


def shown(steps: Sequence[T], what: str) -> Iterable[T]:
    """Go through steps with a bar that tells how many are done.

    Args:
        steps: of the work.
        what: is being done.
    """
    return track(steps, what, console=_console(), transient=True, disable=not sys.stderr.isatty())


@contextmanager
def under_way(what: str) -> Iterator[None]:
    """Tell what is being done within, and since when."""
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    quiet = not sys.stderr.isatty()
    with Progress(*columns, console=_console(), transient=True, disable=quiet) as progress:
        progress.add_task(what, total=None)
        yield


def _console() -> Console:
    return Console(stderr=True)
