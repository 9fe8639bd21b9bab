"""What another process does: it makes results of tasks, or goes ahead with work.

``processes.py`` has the side of the process that asks.
"""

import gc
import signal
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread
from typing import Final, Generic, NamedTuple, TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")


class Made(NamedTuple, Generic[Result]):
    """What a process has made of a task.

    Attributes:
        result: the result; ``None``: there is none.
        refused: the message of a ``ValueError``; ``None``: there was none.
    """

    result: Result | None = None
    refused: str | None = None


def run_other(
    work: Callable[[Connection], None], connection: Connection, inherited: Iterable[Connection]
) -> None:
    """Work in a process that was just forked."""
    for other in inherited:
        other.close()  # otherwise a process whose parent was killed would wait for ever
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its processes
    gc.freeze()
    with suppress(EOFError, OSError):
        work(connection)


def serve(make: Callable[[Task], Result], connection: Connection) -> None:
    """Make results until the other end of the connection is closed.

    A thread takes the tasks meanwhile. Otherwise two processes that write more than a pipe holds
    would wait for each other: one sends a task, and the other a result.
    """
    tasks = SimpleQueue[tuple[Hashable, Task] | None]()
    Thread(target=_receive, args=(connection, tasks), daemon=True).start()
    while (received := tasks.get()) is not None:
        key, task = received
        connection.send((key, _made(make, task)))


def _receive(connection: Connection, tasks: "SimpleQueue[tuple[Hashable, Task] | None]") -> None:
    """Take tasks from a connection until its other end is closed; then add ``None``."""
    with suppress(EOFError, OSError):
        while True:
            tasks.put(connection.recv())
    tasks.put(None)


def _made(make: Callable[[Task], Result], task: Task) -> Made[Result]:
    try:
        return Made(make(task))
    except ValueError as error:
        return Made(refused=str(error))
    except Exception:
        return Made()  # whoever asks makes it anew, and meets the error where it can be told


class Rehearsal(Generic[Task, Result]):
    """Stands for ``Workers`` in a process that rehearses, and tells the search of its results."""

    number: Final = 0

    def __init__(self, pipe: Connection) -> None:
        """Begin with the pipe to the other process."""
        self._pipe = pipe

    def expect(self, tasks: Mapping[Hashable, Task], each: int = 1) -> None:
        """Nobody else makes anything."""

    def result(self, key: Hashable, task: Task) -> None:
        """Return that there is no result."""

    def here(self, key: Hashable, make: Callable[[], Result]) -> Result:
        """Return a result, and tell it.

        Raises:
            ValueError: there is none.
        """
        self._pipe.send((key, None))
        made = _made(lambda _: make(), None)
        self._pipe.send((key, made))
        if made.result is None:
            raise ValueError(made.refused)
        return made.result

    def rehearse(self, work: Callable[["Rehearsal[Task, Result]"], object]) -> None:
        """Rehearse nothing."""

    def close(self) -> None:
        """End nothing."""
