"""Token sequences on disk in Megatron-LM's format: ``PREFIX.bin`` and ``PREFIX.idx``.

``.bin`` holds only token ids, sequence after sequence. ``.idx`` says where each sequence begins;
``index_file`` describes the format. For GPT a sequence is a document. Samples are drawn from
sequences, as in Megatron-LM.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron.data.index_file import (
    REMEDY,
    Index,
    Sequences,
    map_bytes,
    read_index,
    token_dtype,
    write_index,
)
from megatron.native.files import sync, temporary_name


def bin_path(prefix: Path) -> Path:
    """The file of token ids of ``prefix`` (which may itself contain dots)."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: Path) -> Path:
    """The index file of ``prefix`` (which may itself contain dots)."""
    return Path(f"{prefix}.idx")


class IndexedDataset:
    """Read-only view of the sequences of one prefix; tokens are loaded when they are read.

    Attributes:
        prefix: the path without ``.bin`` / ``.idx``.
        named: the flag and the prefix, for messages.
        lengths: tokens of each sequence, int32 [n].
        document_indices: first sequence of each document and, last, n; int64 [d + 1].
        dtype: dtype of the token ids.

    Raises:
        FileNotFoundError: one of the two files is missing.
        ValueError: a file is foreign, truncated, of another version or unreadable, or the two files
            do not match.
    """

    def __init__(self, prefix: Path, flag: str = "--data-path") -> None:
        self.prefix = Path(prefix)
        self.named = f"{flag} {prefix}"
        try:
            _check_files(self.prefix)
            index = read_index(idx_path(self.prefix))
            _check_against_bin(self.prefix, index)
            tokens = map_bytes(bin_path(self.prefix))
        except PermissionError as error:
            raise ValueError(
                f"{error.filename} cannot be read ({error.strerror}): let this user read it, or "
                "give another --data-path"
            ) from error
        self.lengths, self.document_indices = index.sequences
        self._pointers = index.pointers
        self.dtype = index.dtype
        self._tokens = tokens.view(index.dtype)

    @property
    def files(self) -> tuple[Path, Path]:
        """The files of token ids and of the index."""
        return bin_path(self.prefix), idx_path(self.prefix)

    @property
    def mapped(self) -> dict[Path, list[NDArray[np.integer]]]:
        """The arrays that are mapped files, by file."""
        tokens, index = self.files
        return {
            tokens: [self._tokens],
            index: [self.lengths, self._pointers, self.document_indices],
        }

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
        first = int(self._pointers[sequence]) // self.dtype.itemsize
        return self._tokens[first + start : first + stop]


class IndexedWriter:
    """Writes a prefix that is complete or absent, as a context manager.

    Both files grow under temporary names in the target folder. On success the old ``.idx`` is
    removed, then ``.bin`` is renamed, then the new ``.idx``. So a reader finds a whole pair or no
    pair. On an exception the temporary files are removed and the old pair stays.

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
        self._dtype = token_dtype(vocab_size)
        self._lengths: list[int] = []
        self._bin = temporary_name(bin_path(self._prefix))
        self._idx = temporary_name(idx_path(self._prefix))
        self._file = self._bin.open("wb")

    def __enter__(self) -> "IndexedWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
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
        lengths = np.asarray(self._lengths, dtype="<i4")
        documents = np.arange(len(lengths) + 1, dtype="<i8")
        write_index(self._idx, self._dtype, [Sequences(lengths, documents)])
        put_in_place(self._bin, self._idx, self._prefix)


def put_in_place(tokens: Path, index: Path, prefix: Path) -> None:
    """Give a written pair its names; a reader finds a whole pair or none at any moment."""
    sync(tokens)
    sync(index)
    idx_path(prefix).unlink(missing_ok=True)
    tokens.replace(bin_path(prefix))
    index.replace(idx_path(prefix))


def _check_files(prefix: Path) -> None:
    for path in (idx_path(prefix), bin_path(prefix)):
        if not path.is_file():
            raise FileNotFoundError(
                f"--data-path: {path} {'is no file' if path.exists() else 'does not exist'}; give "
                f"the prefix of a .bin/.idx pair without its ending, or {REMEDY}"
            )


def _check_against_bin(prefix: Path, index: Index) -> None:
    """Refuses an index that contradicts itself or its ``.bin``."""
    lengths = index.sequences.lengths.astype(np.int64)
    ends = np.cumsum(lengths) * index.dtype.itemsize
    if (lengths < 0).any() or not np.array_equal(
        index.pointers, ends - lengths * index.dtype.itemsize
    ):
        raise ValueError(
            f"{idx_path(prefix)} is damaged: its pointers do not follow from its lengths; {REMEDY}"
        )
    documents = index.sequences.documents
    ends_meet = len(documents) > 0 and documents[0] == 0 and documents[-1] == len(lengths)
    if not ends_meet or (documents[1:] < documents[:-1]).any():
        raise ValueError(
            f"{idx_path(prefix)} is damaged: its documents do not cover its {len(lengths)} "
            f"sequences; {REMEDY}"
        )
    expected = int(ends[-1]) if len(ends) else 0
    size = bin_path(prefix).stat().st_size
    if size != expected:
        raise ValueError(
            f"{bin_path(prefix)} has {size} bytes where {idx_path(prefix)} promises {expected}: "
            f"the two do not belong together or a copy was cut short; copy both again or {REMEDY}"
        )
