"""Reads JSON lines (plain, gzip, zstandard) and parquet in blocks of whole records.

Where a block ends depends only on the file. So a resumed run finds the same blocks again, and any
number of workers makes the same result. The first bytes of a file tell its format; its name does
not matter.
"""

import gzip
import io
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, cast

from megatron.data.tokenizers.files import library

BLOCK_BYTES: Final = 1 << 20
"""Bytes of JSON lines in a block; the block goes on to the end of its last line."""

BLOCK_ROWS: Final = 512
"""Rows of a block of parquet, at most."""

LONGEST_LINE: Final = 1 << 30
"""Bytes from which on a line is too long for JSON lines; the file is refused."""

_SKIPPED_BYTES = 1 << 22


@dataclass(frozen=True)
class Block:
    """Consecutive records of a file.

    Attributes:
        records: JSON lines as they stand in the file, or the values of each parquet column.
        end: position behind the records, in bytes of uncompressed text or in rows.
        file_bytes: bytes of the file on disk read so far; for parquet estimated from the rows.
    """

    records: bytes | Mapping[str, Sequence[object]]
    end: int
    file_bytes: int


def blocks(path: Path, keys: Sequence[str], start: int = 0) -> Iterator[Block]:
    """Yield the records of a file in order, in blocks.

    Args:
        path: the file.
        keys: columns that are read from a parquet file.
        start: ``end`` of the last block that is already done.

    Raises:
        ValueError: the file cannot be read, is damaged, lacks a column, or there is no library for
            it; the message begins with --input and names the file.
    """
    try:
        yield from _blocks(path, keys, start)
    except (EOFError, zlib.error, OSError, _DamagedError) as error:
        why = " ".join(str(error).split())  # Arrow's messages have several lines
        raise ValueError(
            f"--input {path} is damaged, cut short or cannot be read ({why}); copy it again"
        ) from error


class _DamagedError(Exception):
    """Content that the library of its format cannot read."""


def _blocks(path: Path, keys: Sequence[str], start: int) -> Iterator[Block]:
    with path.open("rb") as file:
        head = file.read(4)
        file.seek(0)
        if head == b"PAR1":
            yield from _rows(path, keys, start)
            return
        opener = next((o for magic, o in _OPENERS.items() if head.startswith(magic)), None)
        text: IO[bytes] = opener(file) if opener else file
        if opener is None:
            text.seek(start)
        else:
            _skip(text, start)
        yield from _lines(path, file, text, start)


def _lines(path: Path, file: IO[bytes], text: IO[bytes], start: int) -> Iterator[Block]:
    end = start
    while records := text.read(BLOCK_BYTES):
        if not records.endswith(b"\n"):
            records += text.readline(LONGEST_LINE)
        if len(records) >= LONGEST_LINE:
            raise ValueError(
                f"--input {path} has a line of more than {LONGEST_LINE:,} bytes after byte {end}: "
                "give JSON lines, one object in each"
            )
        end += len(records)
        yield Block(records, end, file.tell())


def _skip(text: IO[bytes], count: int) -> None:
    """Read ``count`` bytes of compressed text and drop them."""
    while count > 0:
        found = len(text.read(min(count, _SKIPPED_BYTES)))
        if not found:
            raise EOFError("there is less text in it than at its last reading")
        count -= found


def _gunzip(file: IO[bytes]) -> IO[bytes]:
    return cast(IO[bytes], gzip.GzipFile(fileobj=file))


def _unzstd(file: IO[bytes]) -> IO[bytes]:
    return io.BufferedReader(_Zstandard(file, library("zstandard", "--input of zstandard (.zst)")))


_OPENERS: Final[Mapping[bytes, Callable[[IO[bytes]], IO[bytes]]]] = {
    b"\x1f\x8b": _gunzip,
    b"\x28\xb5\x2f\xfd": _unzstd,
}


class _Zstandard(io.RawIOBase):
    """The text of zstandard frames; a frame that is cut short raises ``EOFError``."""

    def __init__(self, file: IO[bytes], zstandard: Any) -> None:
        self._file, self._library = file, zstandard
        self._frame: Any = None
        self._compressed, self._text = b"", b""

    def readable(self) -> bool:
        """Return true: the stream can be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Copy available text to the buffer and return its number of bytes; 0 at the end."""
        while not self._text:
            self._compressed = self._compressed or self._file.read(1 << 17)
            if not self._compressed:
                if self._frame is not None:
                    raise EOFError("its last frame has no end")
                return 0
            self._decompress()
        count = min(len(buffer), len(self._text))
        buffer[:count], self._text = self._text[:count], self._text[count:]
        return count

    def _decompress(self) -> None:
        if self._frame is None:
            self._frame = self._library.ZstdDecompressor().decompressobj()
        try:
            self._text = self._frame.decompress(self._compressed)
        except self._library.ZstdError as error:
            raise _DamagedError(error) from error
        self._compressed = b""
        if self._frame.eof:
            self._compressed, self._frame = self._frame.unused_data, None


def _rows(path: Path, keys: Sequence[str], start: int) -> Iterator[Block]:
    arrow_error: type[Exception] = library("pyarrow", "--input of parquet").ArrowException
    parquet = library("pyarrow.parquet", "--input of parquet")
    size = path.stat().st_size
    try:
        file = parquet.ParquetFile(path)
        lacking = [key for key in keys if key not in file.schema_arrow.names]
        if lacking:
            raise ValueError(
                f"--input {path} has no column {lacking[0]}: give --json-keys of its columns, "
                f"{', '.join(file.schema_arrow.names)}"
            )
        total = max(1, file.metadata.num_rows)
        first = 0  # first row of the group
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            end = first
            if start < first + rows:
                for batch in file.iter_batches(BLOCK_ROWS, [group], list(keys)):
                    end += batch.num_rows
                    if end > start:
                        yield Block(batch.to_pydict(), end, size * end // total)
            first += rows
    except (arrow_error, UnicodeDecodeError) as error:
        raise _DamagedError(error) from error
