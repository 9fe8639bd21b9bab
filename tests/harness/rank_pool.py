"""Distributed tests without a start-up per test: a few persistent processes play the ranks.

`RankPool.run` hands a module-level function to as many workers as it has ranks and returns what
each of them returned. Whatever goes wrong in a rank (an exception, a death, silence) becomes one
`RankError` in the test, soon, and never a hang.
"""

import itertools
import math
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from multiprocessing import connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

from harness.patience import answer_seconds, collective_seconds
from harness.rank_worker import READY, PoolTask, serve

START_TIMEOUT = 120.0
"""Seconds until a worker that does not listen counts as one that will not."""

PRELOADED = (
    "torch.distributed",
    "torch.fx.experimental.symbolic_shapes",  # autograd imports it in its first backward
    "correctness.rank_runs",
)
"""Modules that a worker has when it starts."""


class RankError(Exception):
    """Some ranks of a call failed.

    Attributes:
        causes: what happened to each rank that did not return, by rank: the text of its
            traceback, how it died, or where it was stuck. The dead come first, then those that
            raised in the order in which they did: read the first, the rest is mostly its echo.
    """

    def __init__(self, causes: dict[int, str]) -> None:
        super().__init__("\n".join(f"rank {rank}: {cause}" for rank, cause in causes.items()))
        self.causes = causes


class _Worker:
    """The pool's side of one worker process."""

    def __init__(self, stacks_path: Path) -> None:
        stacks_path.touch()  # for a worker killed before it opens the file itself
        # Workers are forked from a process that has only imported what most need: threads of its
        # own, which it has once it computes, would not survive a fork.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOADED))
        # Python 3.11's fork server does not look where we do, and what it misses it passes over.
        self.connection, far_end = context.Pipe()
        self.process = context.Process(target=serve, args=(far_end, str(stacks_path)), daemon=True)
        with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(map(os.path.abspath, sys.path))):
            self.process.start()
        far_end.close()  # so that the worker's death is the end of file on our side
        self._stacks_path = stacks_path

    def receive(self) -> tuple[float | None, Any] | None:
        """The answer to the last job; None when the worker died instead."""
        try:
            message = self.connection.recv_bytes()
        except (EOFError, OSError):  # OSError: in the middle of the answer
            return None
        raised, content = pickle.loads(message)
        return raised, content

    def wait_until_ready(self, seconds: float) -> None:
        """Return when the process listens; a call will tell if it does not, or has died."""
        with suppress(EOFError, OSError):
            if self.connection.poll(seconds):
                assert self.connection.recv_bytes() == READY

    def waits(self) -> bool:
        """Whether the process is there between two jobs: only its death can be read then."""
        return self.process.is_alive() and not self.connection.poll()

    def describe_death(self) -> str:
        """How the process ended, in words."""
        self.process.join()
        code = self.process.exitcode
        assert code is not None
        return f"died of {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"

    def ask_for_stacks(self) -> None:
        """Make the process write down where it is; `stacks` reads it a moment later."""
        if self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, signal.SIGUSR1)

    def stacks(self) -> str:
        """The stacks of the process's threads, innermost call first."""
        return self._stacks_path.read_text()

    def kill(self) -> None:
        """End the process whatever it is doing."""
        self.process.kill()
        self.process.join()
        self.process.close()
        self.connection.close()


class RankPool(AbstractContextManager["RankPool"]):
    """Up to `size` worker processes, started when first needed and kept until `close`.

    Use it as a context manager. It may be used again after a failed call: workers that are in no
    known state are killed with the call, and the next one starts new ones.

    Args:
        size: largest world size.
        answer_timeout: seconds a call may take before its silent ranks are killed; ``None``: as
            ``harness/patience.py`` says.
        collective_timeout: seconds until a collective that some rank never joined raises in the
            ranks that did; ``None``: likewise.
        grace: seconds the other ranks have to answer once one has raised. Its hanging up
            normally makes them raise within milliseconds.
    """

    def __init__(
        self,
        size: int,
        answer_timeout: float | None = None,
        collective_timeout: float | None = None,
        grace: float = 5.0,
    ) -> None:
        self.size = size
        self._answer_timeout = answer_timeout or answer_seconds()
        self._collective_timeout = collective_timeout or collective_seconds()
        self._grace = grace
        self._workers: list[_Worker] = []
        self._calls = itertools.count()
        self._folder = tempfile.TemporaryDirectory(prefix="rank_pool_")

    def run(self, function: Callable[..., Any], world_size: int, /, **kwargs: Any) -> list[Any]:
        """Call ``function(rank, world_size, **kwargs)`` on every rank of a fresh gloo world.

        Arguments and results travel by pickle: tensors as copies, views with their whole storage.
        The warning filters and the import path are the caller's.

        Args:
            function: a module-level function of an importable module (a test module is one).
            world_size: ranks, at most `size`.
            **kwargs: the same for every rank.

        Returns:
            The results by rank.

        Raises:
            RankError: if any rank raised, died or did not answer in time.
            ValueError: if the pool has fewer than `world_size` workers.
        """
        if not 1 <= world_size <= self.size:
            raise ValueError(
                f"world_size is {world_size}, but this pool has {self.size} workers: "
                f"use 1 to {self.size} or a larger pool"
            )
        call = pickle.dumps((function, kwargs, list(warnings.filters)))
        sys_path = [os.path.abspath(entry) for entry in sys.path]
        self._start(world_size)
        # A file rather than a port: nothing to race for, no name to look up, no rank that serves.
        store_path = str(Path(self._folder.name) / f"store-{next(self._calls)}")
        try:
            for rank, worker in enumerate(self._workers[:world_size]):
                task = PoolTask(
                    rank, world_size, store_path, self._collective_timeout, sys_path, call
                )
                with suppress(BrokenPipeError):  # a dead worker: `_collect` says how it died
                    worker.connection.send_bytes(pickle.dumps(task))
            return self._collect(world_size)
        except BaseException as error:
            if not isinstance(error, RankError):  # say, Ctrl-C: workers may be anywhere
                self._kill_workers()
            raise

    def close(self) -> None:
        """Kill the workers and remove what they wrote."""
        self._kill_workers()
        self._folder.cleanup()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, count: int) -> None:
        if not all(worker.waits() for worker in self._workers):
            self._kill_workers()
        new = range(len(self._workers), count)
        self._workers += [_Worker(Path(self._folder.name) / f"stacks-{k}") for k in new]
        for k in new:  # a machine with much to do takes its time, which is not the call's
            self._workers[k].wait_until_ready(START_TIMEOUT)

    def _collect(self, world_size: int) -> list[Any]:
        """Wait for the answers; on a failure only as long as the others may take to notice."""
        silent = {self._workers[rank].connection: rank for rank in range(world_size)}
        results: dict[int, Any] = {}
        failures: list[tuple[float, int, str]] = []  # when, rank, cause
        deadline = time.monotonic() + self._answer_timeout
        while silent:
            ready = connection.wait(list(silent), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in [rank for end, rank in silent.items() if end in ready]:
                del silent[self._workers[rank].connection]
                match self._workers[rank].receive():
                    case None:
                        failures.append((-math.inf, rank, self._workers[rank].describe_death()))
                        deadline = time.monotonic()
                    case (None, result):
                        results[rank] = result
                    case (raised, trace):
                        failures.append((raised, rank, f"raised\n{trace}"))
                        deadline = min(deadline, time.monotonic() + self._grace)
        causes = {rank: cause for _, rank, cause in sorted(failures)}
        if silent:
            causes |= self._kill_silent(sorted(silent.values()))
        if causes:
            raise RankError(causes)
        return [results[rank] for rank in range(world_size)]

    def _kill_silent(self, ranks: list[int]) -> dict[int, str]:
        """Kill the pool; say for each of the ranks that did not answer where it was stuck."""
        for rank in ranks:
            self._workers[rank].ask_for_stacks()
        time.sleep(0.3)  # writing them takes well under a millisecond once scheduled
        causes = {rank: f"did not answer\n{self._workers[rank].stacks()}" for rank in ranks}
        self._kill_workers()
        return causes

    def _kill_workers(self) -> None:
        for worker in self._workers:
            worker.kill()
        self._workers.clear()
