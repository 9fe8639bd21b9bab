r"""Token sequences on disk in Megatron-LM's format: ``PREFIX.bin`` and ``PREFIX.idx``.

``.bin`` is nothing but token ids, sequence after sequence. ``.idx`` (little-endian) says where each
one begins:

    9 bytes  magic ``MMIDIDX\0\0``
    uint64   version, 1
    uint8    dtype code of the token ids
    uint64   number of sequences n
    uint64   number of document boundaries d + 1
    int32    [n] tokens of each sequence
    int64    [n] byte position of each sequence in ``.bin``
    int64    [d + 1] first sequence of each document, then n

For GPT a sequence is a document, and samples are drawn from sequences, as Megatron-LM does.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from megatron.native.files import sync, temporary_name

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES: dict[int, str] = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_FLOAT_DTYPES = {6: "float64", 7: "float32"}
_UINT16_VOCABULARY = 65500  # Megatron-LM's limit; a little below 2**16 for tokens added later
_REMEDY = "prepare the data again, for example with tools/sample_data.py"


def bin_path(prefix: Path) -> Path:
    """The file of token ids of ``prefix`` (which may itself contain dots)."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: Path) -> Path:
    """The index file of ``prefix`` (which may itself contain dots)."""
    return Path(f"{prefix}.idx")


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.int32]:
    """The dtype in which Megatron-LM stores ids of a vocabulary of ``vocab_size`` entries."""
    return np.uint16 if vocab_size < _UINT16_VOCABULARY else np.int32


class IndexedDataset:
    """Read-only view of the sequences of one prefix; nothing is loaded before it is asked for.

    Attributes:
        prefix: the path without ``.bin`` / ``.idx``.
        lengths: tokens of each sequence, int32 [n].
        document_indices: first sequence of each document and, last, n; int64 [d + 1].

    Raises:
        FileNotFoundError: one of the two files is missing.
        ValueError: a file is foreign, truncated, of another version, or cannot be read, or the two
            do not match.
    """

    def __init__(self, prefix: Path) -> None:
        self.prefix = Path(prefix)
        try:
            _check_files(self.prefix)
            index = _read_index(idx_path(self.prefix))
            _check_against_bin(self.prefix, index)
            tokens = _map_bytes(bin_path(self.prefix))
        except PermissionError as error:
            raise ValueError(
                f"{error.filename} cannot be read ({error.strerror}): let this user read it, or "
                "give another --data-path"
            ) from error
        self.lengths = index.lengths
        self.document_indices = index.document_indices
        self._pointers = index.pointers
        self._dtype = index.dtype
        self._tokens = tokens.view(index.dtype)

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.lengths)

    def __getitem__(self, sequence: int) -> NDArray[np.integer]:
        """All tokens of one sequence, a read-only view in the file's dtype."""
        if not 0 <= sequence < len(self):
            raise IndexError(f"sequence {sequence} of {len(self)} in {self.prefix}")
        return self.read(sequence, 0, int(self.lengths[sequence]))

    def read(self, sequence: int, start: int, stop: int) -> NDArray[np.integer]:
        """Tokens ``[start, stop)`` of one sequence, a read-only view in the file's dtype.

        The sampler calls it often, so the bounds are not checked.
        """
        first = int(self._pointers[sequence]) // self._dtype.itemsize
        return self._tokens[first + start : first + stop]


class IndexedWriter:
    """Writes a prefix that is complete or absent, as a context manager.

    Both files grow under temporary names in the target folder. On success the old ``.idx`` goes,
    ``.bin`` is renamed, and the new ``.idx`` comes last, so a reader finds a whole pair or none; on
    an exception the temporary files are removed and the old pair stays.

    Args:
        prefix: the path without ``.bin`` / ``.idx``; its folder must exist.
        vocab_size: size of the vocabulary, which decides the dtype and bounds the ids.

    Example:
        >>> with IndexedWriter(Path("corpus"), vocab_size=32000) as writer:
        ...     writer.add_document([5, 6, 7, 2])
    """

    def __init__(self, prefix: Path, vocab_size: int) -> None:
        self._prefix = Path(prefix)
        self._vocab_size = vocab_size
        self._dtype = np.dtype(token_dtype(vocab_size)).newbyteorder("<")
        self._lengths: list[int] = []
        self._bin = temporary_name(bin_path(self._prefix))
        self._idx = temporary_name(idx_path(self._prefix))
        self._file = self._bin.open("wb")

    def __enter__(self) -> "IndexedWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        try:
            if kind is None:
                self._commit()
        finally:
            self._bin.unlink(missing_ok=True)
            self._idx.unlink(missing_ok=True)

    def add_document(self, tokens: Sequence[int] | NDArray[np.integer]) -> None:
        """Appends one document as one sequence.

        Args:
            tokens: token ids [n], the end-of-document token included.

        Raises:
            ValueError: an id is negative or not below the vocabulary size.
        """
        ids = np.asarray(tokens, dtype=np.int64)
        if ids.size and not 0 <= ids.min() <= ids.max() < self._vocab_size:
            raise ValueError(
                f"{self._prefix}: token ids {ids.min()}..{ids.max()} of document "
                f"{len(self._lengths)} are outside the vocabulary of {self._vocab_size} entries; "
                "write with the size of the tokenizer that made them"
            )
        self._file.write(ids.astype(self._dtype).tobytes())
        self._lengths.append(ids.size)

    def _commit(self) -> None:
        count = len(self._lengths)
        lengths = np.asarray(self._lengths, dtype="<i4")
        ends = np.cumsum(lengths, dtype=np.int64) * self._dtype.itemsize
        pointers = (ends - lengths.astype(np.int64) * self._dtype.itemsize).astype("<i8")
        code = next(code for code, name in _DTYPES.items() if np.dtype(name) == self._dtype)
        with self._idx.open("wb") as file:
            file.write(_HEADER.pack(_MAGIC, _VERSION, code, count, count + 1))
            for array in (lengths, pointers, np.arange(count + 1, dtype="<i8")):
                file.write(array.tobytes())
        sync(self._bin)
        sync(self._idx)
        idx_path(self._prefix).unlink(missing_ok=True)
        self._bin.replace(bin_path(self._prefix))
        self._idx.replace(idx_path(self._prefix))


@dataclass(frozen=True)
class _Index:
    dtype: np.dtype[np.integer]
    lengths: NDArray[np.int32]
    pointers: NDArray[np.int64]
    document_indices: NDArray[np.int64]


def _map_bytes(path: Path) -> NDArray[np.uint8]:
    """Maps a whole file. A plain ndarray: views of ``np.memmap`` cost a microsecond more each."""
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.empty(0, np.uint8)
    return np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))


def _check_files(prefix: Path) -> None:
    for path in (idx_path(prefix), bin_path(prefix)):
        if not path.is_file():
            raise FileNotFoundError(
                f"--data-path: {path} {'is no file' if path.exists() else 'does not exist'}; give "
                f"the prefix of a .bin/.idx pair without its ending, or {_REMEDY}"
            )


def _read_index(path: Path) -> _Index:
    """Maps ``path`` and splits it by its header, refusing what is not a complete index."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_HEADER.size)
    if not head.startswith(_MAGIC):
        raise ValueError(
            f"{path} is no Megatron-LM index: it starts with {head[:9]!r} instead of {_MAGIC!r}; "
            f"point --data-path at a .bin/.idx pair, or {_REMEDY}"
        )
    if len(head) < _HEADER.size:
        raise ValueError(f"{path} is truncated: {size} bytes, less than its header; {_REMEDY}")
    _, version, code, sequences, boundaries = _HEADER.unpack(head)
    if version != _VERSION:
        raise ValueError(f"{path} has version {version}, this reads {_VERSION}; {_REMEDY}")
    if code not in _DTYPES:
        found = _FLOAT_DTYPES.get(code, "unknown")
        raise ValueError(
            f"{path} has dtype code {code} ({found}), token ids need one of {sorted(_DTYPES)}; "
            f"{_REMEDY}"
        )
    expected = _HEADER.size + 12 * sequences + 8 * boundaries
    if size != expected:
        kind = "truncated" if size < expected else "too long"
        raise ValueError(
            f"{path} is {kind}: {size} bytes where {sequences} sequences and {boundaries} document "
            f"boundaries need {expected}; copy it again or {_REMEDY}"
        )
    raw = _map_bytes(path)
    lengths, pointers, documents = np.split(
        raw[_HEADER.size :], [4 * sequences, 12 * sequences], axis=0
    )
    return _Index(
        np.dtype(_DTYPES[code]),
        lengths.view("<i4"),
        pointers.view("<i8"),
        documents.view("<i8"),
    )


def _check_against_bin(prefix: Path, index: _Index) -> None:
    """Refuses an index that contradicts itself or its ``.bin``."""
    lengths = index.lengths.astype(np.int64)
    ends = np.cumsum(lengths) * index.dtype.itemsize
    if (lengths < 0).any() or not np.array_equal(
        index.pointers, ends - lengths * index.dtype.itemsize
    ):
        raise ValueError(
            f"{idx_path(prefix)} is damaged: its pointers do not follow from its lengths; {_REMEDY}"
        )
    documents = index.document_indices
    if len(documents) == 0 or documents[0] != 0 or documents[-1] != len(lengths):
        raise ValueError(
            f"{idx_path(prefix)} is damaged: its documents do not cover its {len(lengths)} "
            f"sequences; {_REMEDY}"
        )
    expected = int(ends[-1]) if len(ends) else 0
    size = bin_path(prefix).stat().st_size
    if size != expected:
        raise ValueError(
            f"{bin_path(prefix)} has {size} bytes where {idx_path(prefix)} promises {expected}: "
            f"the two do not belong together or a copy was cut short; copy both again or {_REMEDY}"
        )
