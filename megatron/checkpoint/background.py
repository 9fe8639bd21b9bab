"""One piece of work at a time on a thread of its own, for saves that training does not wait for."""

import threading
from collections.abc import Callable


class Background:
    """Runs work on a thread; there is at most one piece at a time."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._outcome: str | BaseException | None = None

    def start(self, work: Callable[[], str]) -> None:
        """Begin ``work``, which returns its outcome in words."""
        assert self._thread is None, "the last work has not been waited for"

        def run() -> None:
            try:
                self._outcome = work()
            except BaseException as error:
                self._outcome = error  # it is raised where it can end the job

        self._thread = threading.Thread(target=run, name="checkpoint")
        self._thread.start()

    def finished(self) -> str | None:
        """Return the outcome if the work has ended, else ``None``; as ``wait``, without waiting."""
        if self._thread is None or self._thread.is_alive():
            return None
        return self.wait()

    def wait(self) -> str | None:
        """Wait for the work, and return its outcome; ``None`` if there is no work.

        Raises:
            BaseException: what the work has raised.
        """
        if self._thread is None:
            return None
        self._thread.join()
        self._thread = None
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome
