"""The lines that a file has got since the last look, although its writer may be killed at any time.

A writer leaves half a line behind, puts another file in its place, or makes it shorter. So only
whole lines are taken, and a file that is no longer the one of the last look is read from its start.
"""

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

LONGEST: Final = 16 << 20
"""Bytes of the longest line that is read. A record of 100,000 ranks has about 8 million."""

_AT_ONCE: Final = 1 << 20
_MARK: Final = 512  # bytes at both ends of what has been read, by which the file is known again


@dataclass(frozen=True)
class Appended:
    """The result of a look.

    Attributes:
        lines: whole lines without their ends.
        anew: whether they are the first lines of another file, so that all earlier lines are void.
        is_all: whether nothing more can be read now.
        fault: reason why the file cannot be read; empty: the file can be read.
    """

    lines: tuple[bytes, ...] = ()
    anew: bool = False
    is_all: bool = True
    fault: str = ""


class GrowingFile:
    """A file of lines that grows.

    Attributes:
        path: the file. It need not exist yet.
        size: its bytes at the last look.
        done: bytes from its start that have been read.
        too_long: lines above ``longest``, which are left out.
        replaced: how often another or a shorter file stood in its place.
    """

    def __init__(self, path: Path, longest: int = LONGEST, at_once: int = _AT_ONCE) -> None:
        self.path = path
        self.size = self.done = self.too_long = self.replaced = 0
        self._longest, self._at_once = longest, min(at_once, longest)
        self._node: tuple[int, int] | None = None
        self._head = self._tail = b""
        self._within_too_long = False

    def look(self) -> Appended:
        """Return some of the new lines; a fault changes nothing."""
        try:
            if not stat.S_ISREG(os.stat(self.path).st_mode):
                return Appended(fault="is no regular file")
            with self.path.open("rb") as file:
                return self._look(file.fileno())
        except OSError as error:
            return Appended(fault=error.strerror or str(error))

    def _look(self, file: int) -> Appended:
        found = os.fstat(file)
        node = (found.st_dev, found.st_ino)
        anew = self._node is not None and not self._is_same(file, node, found.st_size)
        if anew:
            self.replaced += 1
            self.done, self._head, self._tail, self._within_too_long = 0, b"", b"", False
            self.too_long = 0
        self._node, self.size = node, found.st_size
        block = os.pread(file, self._at_once, self.done)
        if b"\n" not in block and len(block) == self._at_once:
            block += os.pread(file, self._longest + 1 - len(block), self.done + len(block))
        before, lines = self.done, self._taken(block)
        return Appended(lines, anew, is_all=self.done == before)

    def _is_same(self, file: int, node: tuple[int, int], size: int) -> bool:
        """Whether the file is that of the last look, with perhaps more lines at its end."""
        return (
            node == self._node
            and size >= self.done
            and os.pread(file, len(self._head), 0) == self._head
            and os.pread(file, len(self._tail), self.done - len(self._tail)) == self._tail
        )

    def _taken(self, block: bytes) -> tuple[bytes, ...]:
        """Take the whole lines at the start of a block, or all of it within too long a line."""
        end = block.rfind(b"\n") + 1
        if not end and not self._within_too_long and len(block) > self._longest:
            self.too_long += 1
            self._within_too_long = True
        if not end and self._within_too_long:
            end = len(block)
        taken = block[:end]
        self.done += end
        self._head = (self._head + taken)[:_MARK] if len(self._head) < _MARK else self._head
        self._tail = (self._tail + taken)[-_MARK:]
        if self._within_too_long:
            _, is_over, taken = taken.partition(b"\n")
            self._within_too_long = not is_over
        return tuple(line for line in taken.split(b"\n") if line.strip())
