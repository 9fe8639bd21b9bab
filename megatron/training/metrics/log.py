"""Where the records of a run go: a list of sinks, of which none can end the run."""

from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Protocol

from megatron.training.metrics.log_line import evaluation_lines, iteration_line
from megatron.training.metrics.records import Evaluation, Interval, Record

Say = Callable[[str], None]
"""Prints lines; only rank 0 does."""


class Sink(Protocol):
    """Takes the records that it has a use for."""

    @property
    def name(self) -> str:
        """The flag that asks for it, with its value."""
        ...

    @property
    def wants_ranks(self) -> bool:
        """Whether it has a use for memory and idle time by rank, which all ranks must gather."""
        ...

    def write(self, record: Record) -> None:
        """Take a record.

        Raises:
            OSError: it could not be written.
        """
        ...

    def close(self, failed: bool) -> None:
        """Write what is left; ``failed``: the run ends by an error, of which nothing may be hidden.

        Raises:
            OSError: it could not be written.
        """
        ...


class Lines:
    """Prints Megatron's lines.

    Args:
        say: prints.
    """

    name = "the printed lines"
    wants_ranks = False

    def __init__(self, say: Say) -> None:
        self._say = say

    def write(self, record: Record) -> None:
        """Print what Megatron has a line for."""
        if isinstance(record, Interval):
            self._say(iteration_line(record))
        elif isinstance(record, Evaluation):
            self._say(evaluation_lines(record))

    def close(self, failed: bool) -> None:
        """Do nothing: every line is printed at once."""


class Log:
    """All that a run tells: lines for people, and records. Only that of rank 0 tells anything.

    As a context it closes itself if the context ends by an error.

    Args:
        say: prints lines.
        sinks: take the records, in this order.
    """

    def __init__(self, say: Say, sinks: Sequence[Sink] = ()) -> None:
        self._say = say
        self._sinks = sinks
        self._failing: set[str] = set()

    @property
    def wants_ranks(self) -> bool:
        """Whether a sink has a use for figures of every rank."""
        return any(sink.wants_ranks for sink in self._sinks)

    def say(self, text: str, flush: bool = True) -> None:
        """Print a line, always at once; ``flush`` is there because callers of ``print`` give it."""
        self._say(text)

    def write(self, record: Record) -> None:
        """Give a record to every sink."""
        for sink in self._sinks:
            self._attempt(sink, partial(sink.write, record))

    def close(self, failed: bool = False) -> None:
        """Close every sink; ``failed``: the run ends by an error."""
        for sink in self._sinks:
            self._attempt(sink, partial(sink.close, failed))
        self._sinks = ()

    def __enter__(self) -> "Log":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.close(failed=True)

    def _attempt(self, sink: Sink, work: Callable[[], None]) -> None:
        """Do ``work``; tell a failure once, and try again with the next record."""
        try:
            work()
        except OSError as error:
            if sink.name not in self._failing:
                self._failing.add(sink.name)
                self.say(f"{sink.name}: {error}; training goes on without these records")
