"""The runs in a file of records, which is read on while it grows, and the faults of its lines.

A file of a million records takes about a minute to read. Until then some lines at even distances
stand for all, so that a page opens at once.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from megatron.commands.watching.growing_file import LONGEST, GrowingFile
from megatron.commands.watching.record import EVENTS, record_of, word
from megatron.commands.watching.run import Run

MOST_RUNS: Final = 100
"""Runs of a file that are read; records of further ones are only counted."""


_LARGE: Final = 16 << 20  # bytes of a file that is read within a second or so
_GLANCES: Final = 2000
_GLANCE: Final = 1 << 16  # bytes of the longest line that a glance takes


class RecordsFile:
    """A file that ``--log-jsonl`` writes.

    Attributes:
        name: what the page calls it.
        records: that were taken.
        fault: reason why the file cannot be read now; empty: the file can be read.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.name = name
        self._file = GrowingFile(path)
        self._reset()
        self.fault, self._is_all, self._glanced = "", False, dict[str, Run]()

    def _reset(self) -> None:
        self._runs: dict[str, Run] = {}
        self.records = self._lines = 0
        self._broken = self._first_broken = self._strange = self._above = 0

    @property
    def path(self) -> Path:
        """The file."""
        return self._file.path

    @property
    def runs(self) -> Mapping[str, Run]:
        """The runs by id, in the order of their first records."""
        return self._glanced or self._runs

    @property
    def is_glanced(self) -> bool:
        """Whether ``runs`` come from a glance: the file is being read for the first time."""
        return bool(self._glanced)

    @property
    def bytes_read(self) -> tuple[int, int]:
        """How many bytes have been read, and how many the file had at the last look."""
        return self._file.done, self._file.size

    def read_some(self) -> bool:
        """Take some of the lines that are new; return whether there may be more of them now."""
        found = self._file.look()
        self.fault, self._is_all = found.fault, found.is_all
        if found.anew:
            self._reset()
        if found.anew or found.is_all:
            self._glanced = {}
        for line in found.lines:
            self._take(line)
        return not found.is_all

    def glance(self) -> None:
        """Take some lines of a large file for all of them, until the file has been read."""
        try:
            size = os.stat(self.path).st_size if self.path.is_file() else 0
            lines = list(_glances(self.path, size)) if size > _LARGE else []
        except OSError:
            return  # the first look at the file tells the fault
        runs: dict[str, Run] = {}
        for record in filter(None, map(record_of, lines)):
            key = word(record.get("run"))
            if record["event"] in EVENTS and (key in runs or len(runs) < MOST_RUNS):
                runs.setdefault(key, Run(self.name, key)).take(record)
        self._glanced = runs

    def read_all(self) -> None:
        """Take all lines that the file has now."""
        while self.read_some():
            pass

    def _take(self, line: bytes) -> None:
        self._lines += 1
        record = record_of(line)
        if record is None:
            self._first_broken = self._first_broken or self._lines
            self._broken += 1
            return
        if record["event"] not in EVENTS:
            self._strange += 1
            return
        key = word(record.get("run"))
        if key not in self._runs:
            if len(self._runs) >= MOST_RUNS:
                self._above += 1
                return
            self._runs[key] = Run(self.name, key)
        self._runs[key].take(record)
        self.records += 1

    def notes(self) -> Iterator[str]:
        """Yield a sentence about everything in the file that is not shown."""
        if self.fault:
            yield f"{self.name}: the file cannot be read now: {self.fault}."
        if self._broken:
            yield (
                f"{self.name}: {self._broken:,} lines are no records and are left out; the first "
                f"is the file's line {self._first_broken:,} that is not empty."
            )
        if self._strange:
            yield f"{self.name}: {self._strange:,} records of unknown events are left out."
        if self._file.too_long:
            yield (
                f"{self.name}: {self._file.too_long:,} lines of more than {LONGEST:,} bytes are "
                "left out."
            )
        if self._above:
            yield (
                f"{self.name}: {self._above:,} records of further runs are left out: a file may "
                f"have {MOST_RUNS} runs."
            )
        if self._file.replaced:
            yield (
                f"{self.name}: the file was replaced or made shorter, and has been read from its "
                "start again."
            )
        done, size = self.bytes_read
        if self._is_all and done < size and not self.fault:
            yield (
                f"{self.name}: the last line is cut off: the run was killed while it wrote the "
                "line, or is writing it now."
            )
        if not self.runs and not self.fault:
            yield f"{self.name}: there are no records yet."


def _glances(path: Path, size: int) -> Iterator[bytes]:
    """Yield whole lines at even distances, the first line and one near the end among them."""
    with path.open("rb") as file:
        for index in range(_GLANCES):
            file.seek(index * max(0, size - _GLANCE) // (_GLANCES - 1))
            if index:
                file.readline(_GLANCE)  # the rest of a line
            yield file.readline(_GLANCE)
