"""Two passes take turns on a rank: one works while the exchange of the other is under way.

The forward and the backward of a pair have a thread each, but never run at the same time. When a
pass has begun an exchange on an axis with ``Turns``, the other pass has its turn. At its own next
turn, the pass waits for its exchange. After the end of one pass, the other one runs alone. So only
the layers, and not the time, decide in which order the two passes issue their work. Ranks that run
the same pair issue the exchanges of each group in the same order, which excludes a deadlock. Each
pass has exactly the results that it would have alone.

On CUDA both threads use the stream of the caller. NCCL runs an exchange on a stream of its own, and
waiting for it is an instruction to the stream. So kernels of the other pass, which the host issues
in between, run during the exchange.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from threading import Condition

import torch


class _AbandonedError(Exception):
    """The other pass of the pair has failed, so this one cannot end either."""


class Turns:
    """The turns of the two passes of a pair; one pair runs at a time."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._turn = 0
        self._over = [True, True]
        self._has_failed = False
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pair")

    def run(self, first: Callable[[], None], second: Callable[[], None]) -> None:
        """Run both; ``first`` begins, in a thread of its own.

        If one of them fails, the other one ends at its next turn: other ranks may wait for the one
        that has failed, so exchanges would never come to an end.

        Raises:
            BaseException: the error of the pass that failed first.
        """
        self._turn, self._over, self._has_failed = 0, [False, False], False
        stream = _current_stream()

        def beside() -> None:
            # PyTorch has a current stream for each thread.
            with stream():
                self._play(0, first)

        running = self._worker.submit(beside)
        found: BaseException | None = None
        try:
            self._play(1, second)
        except BaseException as error:
            found = error
        try:
            running.result()
        except BaseException as error:
            if found is None or isinstance(found, _AbandonedError):
                found = error
        self._has_failed = False
        if found is not None:
            raise found

    def hand_over(self) -> None:
        """Let the other pass go on; return when the other pass hands over again or ends.

        Without a pair, or when the other pass has ended before, the call returns immediately.
        """
        own = self._turn  # only the pass whose turn it is can call
        if not self._over[1 - own]:
            with self._changed:
                self._turn = 1 - own
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._turn == own)
        if self._has_failed:
            raise _AbandonedError("the other pass of the pair has failed")

    def _play(self, own: int, work: Callable[[], None]) -> None:
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._turn == own)
            if not self._has_failed:
                work()
        except BaseException:
            self._has_failed = True
            raise
        finally:
            with self._changed:
                self._over[own] = True
                self._turn = 1 - own
                self._changed.notify_all()


def _current_stream() -> Callable[[], AbstractContextManager[object]]:
    """Return a function that enters the current CUDA stream in another thread."""
    if not torch.cuda.is_initialized():
        return nullcontext
    stream = torch.cuda.current_stream()
    return lambda: torch.cuda.stream(stream)
