"""Finds corpora that change while a run reads them.

A corpus is mapped into memory, so tokens that somebody writes into it are trained on at once, and
a run would not notice. So a run remembers size, time and a sample of the content of every file, and
compares them now and then. A file that was replaced by another file of its name is only told: the
run has mapped the old one.
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Final

from megatron.native.files import open_file

_SPOT: Final = 1 << 12
"""Bytes of a spot that is sampled."""

_SPOTS: Final = (64, 512)
"""Most spots of a file, and of all files together: a few milliseconds on a local disk."""

_FEWEST: Final = 2
"""Fewest spots of a file: its beginning and its end. Of many files only some are sampled."""

WAY_OUT: Final = (
    "put back the file with which the run began, and go on from the last checkpoint (--load)"
)


@dataclass(frozen=True)
class Seen:
    """A file as it was seen.

    Attributes:
        file: device and number on it; another file of the same name has others.
        size: bytes.
        time: when it was last written to, in nanoseconds since 1970.
        sample: a hash of spots of its content, evenly spaced from its first byte to its last;
            ``None``: its content is not compared.
    """

    file: tuple[int, int]
    size: int
    time: int
    sample: str | None = None


@dataclass
class CorpusWatch:
    """The files of a run's corpora, and how they were when the run began.

    Args:
        files: the files.
        epoch: samples of the run after which a corpus is read once more from its beginning.

    Raises:
        OSError: a file is missing.
    """

    files: Sequence[Path] = ()
    epoch: int = 1
    _seen: dict[Path, Seen] = field(default_factory=dict, init=False)
    _told: set[Path] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        for path in self.files:
            stat = path.stat()
            self._seen[path] = Seen(_file(stat), stat.st_size, stat.st_mtime_ns)

    def compare_content(self) -> None:
        """Sample the files, so that checks compare content, too.

        One process of a machine is enough for that. Of more than 256 files 256 are sampled, evenly
        spaced among all.

        Raises:
            OSError: a file cannot be read.
        """
        sampled = min(len(self.files), _SPOTS[1] // _FEWEST)
        for number in range(sampled):
            path = self.files[number * len(self.files) // sampled]
            self._seen[path] = replace(self._seen[path], sample=self._sample(path))

    def check(self) -> list[str]:
        """Compare all files with their state at the beginning.

        Returns:
            A line about each file that was written to, was replaced, or is gone, without a
            difference that this run would read. Each is told once.

        Raises:
            ValueError: a file, and no other one of its name, has another size or other content; the
                message names the file.
        """
        return [line for path in self.files if (line := self._check(path))]

    def _check(self, path: Path) -> str | None:
        seen = self._seen[path]
        try:
            stat = path.stat()
            if _file(stat) != seen.file:
                return self._replaced(path)
            if stat.st_size != seen.size:
                raise ValueError(
                    f"{path} has {stat.st_size} bytes, and had {seen.size} when the run began: "
                    f"{WAY_OUT}"
                )
            if seen.sample is not None and self._sample(path) != seen.sample:
                raise ValueError(
                    f"{path} has other content than when the run began (of as many bytes; written "
                    f"to on {_day(stat.st_mtime_ns)}), so that the run reads other tokens: "
                    f"{WAY_OUT}"
                )
            time = stat.st_mtime_ns
        except OSError as error:
            time, said = 0, f"{path} cannot be read any more ({error}): no run can go on from here"
        else:
            said = (
                f"{path} was written to on {_day(time)}, while the run read it: its size and a "
                "sample of its content are as before, the rest is not compared"
            )
        self._seen[path] = replace(seen, time=time)
        return said if time != seen.time else None

    def _replaced(self, path: Path) -> str | None:
        """Return a line about a file that is another one than at the beginning, if it is new."""
        if path in self._told:
            return None
        self._told.add(path)
        return (
            f"{path} was replaced; this run goes on with the old file; a restart would read the "
            "new one"
        )

    def _sample(self, path: Path) -> str:
        """Return a hash of the spots of a file."""
        found = hashlib.blake2b(digest_size=16)
        spots = max(_FEWEST, min(_SPOTS[0], _SPOTS[1] // len(self.files)))
        with open_file(path) as file:
            last = max(0, os.fstat(file.fileno()).st_size - _SPOT)
            for number in range(spots):
                found.update(os.pread(file.fileno(), _SPOT, last * number // (spots - 1)))
        return found.hexdigest()


def _file(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_dev, stat.st_ino


def _day(nanoseconds: int) -> str:
    return f"{datetime.fromtimestamp(nanoseconds / 1e9):%Y-%m-%d %H:%M:%S}"
