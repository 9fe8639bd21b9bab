"""Finds corpora that change while a run reads them.

A corpus is mapped into memory, so tokens that somebody writes into it are trained on at once, and
a run would not notice. So a run remembers size, time and a sample of the content of every file, and
compares them now and then.
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Final

from megatron.native.files import open_file

_SPOT: Final = 1 << 12
"""Bytes of a spot that is sampled."""

_SPOTS: Final = (64, 512)
"""Most spots of a file, and of all files together: a few milliseconds on a local disk."""

WAY_OUT: Final = (
    "put back the file with which the run began, and go on from the last checkpoint (--load)"
)


@dataclass(frozen=True)
class Seen:
    """A file as it was seen.

    Attributes:
        size: bytes.
        time: when it was last written to, in nanoseconds since 1970.
        sample: a hash of spots of its content, evenly spaced from its first byte to its last.
    """

    size: int
    time: int
    sample: str


@dataclass
class CorpusWatch:
    """The files of a run's corpora, and how they were when the run began.

    Args:
        files: the files; each is read.
        epoch: samples of the run after which a corpus is read once more from its beginning.

    Raises:
        OSError: a file cannot be read.
    """

    files: Sequence[Path] = ()
    epoch: int = 1
    _seen: dict[Path, Seen] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        for path in self.files:
            stat = path.stat()
            self._seen[path] = Seen(stat.st_size, stat.st_mtime_ns, self._sample(path))

    def check(self, *, content: bool = True) -> list[str]:
        """Compare all files with their state at the beginning.

        Args:
            content: whether content is compared, too; one rank of a machine is enough for that.

        Returns:
            A line about each file that was written to, or is gone, without a difference that this
            run would read. Each is told once.

        Raises:
            ValueError: a file has another size or other content; the message names the file.
        """
        return [line for path in self.files if (line := self._check(path, content))]

    def _check(self, path: Path, content: bool) -> str | None:
        seen = self._seen[path]
        try:
            stat = path.stat()
            if stat.st_size != seen.size:
                raise ValueError(
                    f"{path} has {stat.st_size} bytes, and had {seen.size} when the run began: "
                    f"{WAY_OUT}"
                )
            if content and self._sample(path) != seen.sample:
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
        self._seen[path] = Seen(seen.size, time, seen.sample)
        return said if time != seen.time else None

    def _sample(self, path: Path) -> str:
        """Return a hash of the spots of a file."""
        found = hashlib.blake2b(digest_size=16)
        spots = max(2, min(_SPOTS[0], _SPOTS[1] // len(self.files)))
        with open_file(path) as file:
            last = max(0, os.fstat(file.fileno()).st_size - _SPOT)
            for number in range(spots):
                found.update(os.pread(file.fileno(), _SPOT, last * number // (spots - 1)))
        return found.hexdigest()


def _day(nanoseconds: int) -> str:
    return f"{datetime.fromtimestamp(nanoseconds / 1e9):%Y-%m-%d %H:%M:%S}"
