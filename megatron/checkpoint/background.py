"""Runs one piece of work at a time on a thread, so that training need not wait for a save."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Background:
    """Runs work on a thread, one piece of work at a time."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._work: Future[str] | None = None

    def start(self, work: Callable[[], str]) -> None:
        """Begin ``work``, which returns its outcome in words."""
        assert self._work is None, "the last work has not been waited for"
        self._work = self._pool.submit(work)

    def finished(self) -> str | None:
        """Return the outcome if the work has ended, else ``None``; raises errors as ``wait``."""
        return self.wait() if self._work is not None and self._work.done() else None

    def wait(self) -> str | None:
        """Wait for the work, and return its outcome; ``None`` if there is no work.

        Raises:
            BaseException: the exception that the work has raised.
        """
        if self._work is None:
            return None
        work, self._work = self._work, None
        return work.result()
