"""Processes that make results before they are asked for.

One process decides what it needs next and asks for it; the result may follow from earlier ones.
Meanwhile other processes make what it is likely to ask for. Each result depends on its task alone,
so the results, and the order in which they are used, are the same with any number of processes:
whoever guesses wrong loses time and nothing else.

The processes are forks, which have all modules and caches of this process at once. So they are
made before this process computes anything, because a fork must not inherit the threads of a
computation. Where forks are not safe (macOS) or do not exist (Windows), there are none.
"""

import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Final, Generic, TypeVar

from megatron.planning.other_process import Made, Rehearsal, run_other, serve

Task = TypeVar("Task")
Result = TypeVar("Result")

MOST: Final = 8
"""The most processes: a search rarely has more good guesses of what it will need."""
AHEAD: Final = 4
"""Tasks that a process may be given at once where this process is about to be busy for long."""


def cores() -> int:
    """Return how many processes can work at once, at most ``MOST``; 1: only this one."""
    if sys.platform != "linux":
        return 1
    return min(len(os.sched_getaffinity(0)), MOST)


class _Worker:
    """Another process, and the keys of the tasks that it has."""

    def __init__(self, process: BaseProcess, connection: Connection) -> None:
        self.process, self.connection = process, connection
        self.doing: deque[Hashable] = deque()


class Workers(Generic[Task, Result]):
    """Processes that make the results of tasks, until ``close``."""

    def __init__(self, make: Callable[[Task], Result], processes: int) -> None:
        """Fork the processes.

        Args:
            make: makes the result of a task, which depends on the task alone; may raise a
                ``ValueError``. Tasks and results can be pickled.
            processes: number of processes that work at once, this one among them while it does not
                wait for a result; below 2: there is no other process.
        """
        self._likely: dict[Hashable, Task] = {}
        self._made: dict[Hashable, Made[Result]] = {}
        self._workers: list[_Worker] = []
        self._rehearsing: list[_Worker] = []
        for _ in range(processes if processes > 1 else 0):
            self._add(self._workers, partial(serve, make))

    def _add(self, workers: list[_Worker], work: Callable[[Connection], None]) -> None:
        """Fork a process; where the system refuses another one, do without."""
        with suppress(OSError):
            workers.append(self._forked(work))

    def _forked(self, work: Callable[[Connection], None]) -> _Worker:
        own, other = multiprocessing.Pipe()
        inherited = [own, *(worker.connection for worker in self._all)]
        process = multiprocessing.get_context("fork").Process(
            target=run_other, args=(work, other, inherited), daemon=True
        )
        process.start()
        other.close()
        return _Worker(process, own)

    @property
    def _all(self) -> list[_Worker]:
        return [*self._workers, *self._rehearsing]

    def close(self) -> None:
        """End the processes, whatever they do."""
        _end(self._workers)
        _end(self._rehearsing)

    def rehearse(self, work: Callable[[Rehearsal[Task, Result]], object]) -> None:
        """Let another process go ahead with work that this process will do after other work.

        The other process is a fork of this one as it is now. Its results are ready when this
        process asks for them. As soon as this process asks for another result, the other process
        has gone astray, and is ended. So ``work`` may guess.

        Args:
            work: the work, with a rehearsal that stands for these processes.
        """

        def run(pipe: Connection) -> None:
            work(Rehearsal(pipe))

        if self._workers:
            _end(self._rehearsing)
            self._add(self._rehearsing, run)

    def here(self, key: Hashable, make: Callable[[], Result]) -> Result:
        """Return a result that no other process has made."""
        return make()

    @property
    def number(self) -> int:
        """Number of other processes."""
        return len(self._workers)

    def expect(self, tasks: Mapping[Hashable, Task], each: int = 1) -> None:
        """Say which results are likely to be asked for, the likeliest first.

        This replaces what was said before. Results that are made already are kept.

        Args:
            tasks: by a key that tells tasks with other results apart.
            each: tasks that a process may be given now. More than one costs time if a guess is
                wrong, and saves time if this process is busy and gives no others for long.
        """
        if self._workers:
            self._collect()
            self._likely = {key: task for key, task in tasks.items() if not self._has(key)}
            while self._hand_out(each, self._workers[1:]):
                pass

    def result(self, key: Hashable, task: Task) -> Result | None:
        """Return the result of a task; ``None``: no process has made it, so make it here.

        Raises:
            ValueError: the task has no result.
        """
        self._collect()
        if self._workers and not self._has(key):
            _end(self._rehearsing)
            free = [worker for worker in self._workers if not worker.doing]
            self._begin(free[0] if free else self._workers[0], key, task)
        while any(key in worker.doing for worker in self._all):
            while self._hand_out(1, self._workers):
                pass
            wait([worker.connection for worker in self._all if worker.doing])
            self._collect()
        made = self._made.pop(key, Made[Result]())
        if made.refused is not None:
            raise ValueError(made.refused)
        return made.result

    def _has(self, key: Hashable) -> bool:
        """Whether a task is made, or a process has it."""
        return key in self._made or any(key in worker.doing for worker in self._all)

    def _hand_out(self, most: int, workers: Sequence[_Worker]) -> bool:
        """Give the likeliest task to the process with the fewest, unless all have ``most``."""
        able = min(workers, key=lambda worker: len(worker.doing), default=None)
        if able is None or len(able.doing) >= most or not self._likely:
            return False
        key = next(iter(self._likely))
        self._begin(able, key, self._likely.pop(key))
        return True

    def _begin(self, worker: _Worker, key: Hashable, task: Task) -> None:
        worker.doing.append(key)
        with suppress(OSError), _failing_writes():  # whoever reads from it finds that it has died
            worker.connection.send((key, task))

    def _collect(self) -> None:
        """Take the results that are there."""
        for worker in self._all:
            try:
                while worker.connection.poll():
                    self._take(worker, *worker.connection.recv())
            except (EOFError, OSError):
                self._lose(worker)

    def _take(self, worker: _Worker, key: Hashable, made: Made[Result] | None) -> None:
        """Take a result, or the news that a rehearsal begins to make one."""
        if made is None:
            worker.doing.append(key)
        else:
            worker.doing.remove(key)
            self._made[key] = made

    def _lose(self, worker: _Worker) -> None:
        """Go on without a process that has ended; this process makes its results when asked."""
        for own in (self._workers, self._rehearsing):
            if worker in own:
                own.remove(worker)
        worker.process.join()
        worker.connection.close()
        if worker.process.exitcode:
            print(
                f"a process that helps with the search died (exit code {worker.process.exitcode}; "
                "-9: killed, perhaps for its memory); the search goes on without it",
                file=sys.stderr,
            )


def _end(workers: list[_Worker]) -> None:
    """End processes, and forget them."""
    for worker in workers:
        worker.process.kill()  # a request to end may be ignored, as this process may ignore it
    for worker in workers:
        worker.process.join()
        worker.connection.close()
    workers.clear()


@contextmanager
def _failing_writes() -> Iterator[None]:
    """Let a write to a process that has died raise an error, and never end this process."""
    before = signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGPIPE, before)
