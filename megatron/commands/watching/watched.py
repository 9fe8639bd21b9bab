"""All files that a page watches, read on in the background while the page asks for its values."""

import time
from collections.abc import Iterator, Sequence
from threading import Event, Lock, Thread
from typing import Any, Final

from megatron.commands.watching.page_data import View, page_data
from megatron.commands.watching.promise import Promise
from megatron.commands.watching.records_file import RecordsFile
from megatron.commands.watching.run import Run

MOST_RUNS: Final = 32
"""Runs of a page; of more, those with the latest records."""

_PAUSE: Final = 1.0  # seconds between two looks at files that do not grow


class Watched:
    """Files of records.

    Args:
        files: the files.
        promise: the plan of the runs; ``None``: none is given.
    """

    def __init__(self, files: Sequence[RecordsFile], promise: Promise | None = None) -> None:
        self._files, self._promise = files, promise
        self._lock, self._end = Lock(), Event()
        self._version = 0
        self._last: tuple[tuple[View, int], dict[str, Any]] | None = None
        self._thread = Thread(target=self._follow, daemon=True)

    def follow(self) -> None:
        """Begin to read in the background, until ``close``."""
        self._thread.start()

    def close(self) -> None:
        """End reading in the background."""
        self._end.set()
        if self._thread.ident is not None:
            self._thread.join()

    def read_all(self) -> None:
        """Read all that the files have now."""
        for file in self._files:
            file.read_all()
        self._version += 1

    def data(self, view: View) -> dict[str, Any]:
        """Return all values of the page for a part of the curves."""
        with self._lock:
            key = view, self._version
            if self._last is None or self._last[0] != key:
                self._last = key, self._made(view)
            return self._last[1]

    @property
    def version(self) -> int:
        """A number that changes whenever the values do."""
        return self._version

    def _made(self, view: View) -> dict[str, Any]:
        runs = self._runs()
        done, size = (sum(own) for own in zip(*(f.bytes_read for f in self._files), strict=True))
        return {
            "version": self._version,
            "read": min(1.0, done / size) if size else 1.0,
            "glanced": any(file.is_glanced for file in self._files),
            "records": sum(file.records for file in self._files),
            "made": time.time(),
            "notes": list(self._notes(len(runs))),
            "promise": None if self._promise is None else self._promise.as_json(),
            **page_data(runs, view),
        }

    def _runs(self) -> list[Run]:
        """Return the runs to show, in the order of their files."""
        runs = [run for file in self._files for run in file.runs.values()]
        latest = sorted(runs, key=lambda run: (run.latest == run.latest, run.latest))[-MOST_RUNS:]
        return [run for run in runs if any(run is own for own in latest)]

    def _notes(self, shown: int) -> Iterator[str]:
        for file in self._files:
            yield from file.notes()
        if (there := sum(len(file.runs) for file in self._files)) > shown:
            yield f"Of {there} runs the {shown} with the latest records are shown."

    def _follow(self) -> None:
        """Read again and again; a file that is large at first is read in many small steps."""
        for file in self._files:
            with self._lock:
                file.glance()
        while not self._end.is_set():
            more = False
            for file in self._files:
                with self._lock:
                    before = file.records, file.bytes_read, file.fault
                    more = file.read_some() or more
                    self._version += before != (file.records, file.bytes_read, file.fault)
                time.sleep(0)  # a thread that waits for the lock may take it
            if not more:
                self._end.wait(_PAUSE)
