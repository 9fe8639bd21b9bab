"""Shows on a terminal how far a command is. If the output is no terminal, nothing is shown."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, track

T = TypeVar("T")


def shown(steps: Sequence[T], what: str) -> Iterable[T]:
    """Go through the steps of a piece of work, with a bar that shows how many steps are done.

    Args:
        steps: the steps.
        what: name of the work, for the bar.
    """
    return track(steps, what, console=_console(), transient=True, disable=not sys.stderr.isatty())


@contextmanager
def under_way(what: str) -> Iterator[None]:
    """Show the name ``what`` and the time since the start, while the ``with`` block runs."""
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    quiet = not sys.stderr.isatty()
    with Progress(*columns, console=_console(), transient=True, disable=quiet) as progress:
        progress.add_task(what, total=None)
        yield


def _console() -> Console:
    return Console(stderr=True)
