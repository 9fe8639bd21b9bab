r"""The index ``PREFIX.idx`` of Megatron-LM's format: where each sequence of ``PREFIX.bin`` begins.

It is little-endian:

    9 bytes  magic ``MMIDIDX\0\0``
    uint64   version, 1
    uint8    dtype code of the token ids
    uint64   number of sequences n
    uint64   number of document boundaries d + 1
    int32    [n] tokens of each sequence
    int64    [n] byte position of each sequence in ``.bin``
    int64    [d + 1] first sequence of each document, then n
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.native.files import open_file

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES: dict[int, str] = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_FLOAT_DTYPES = {6: "float64", 7: "float32"}
_UINT16_VOCABULARY = 65500  # Megatron-LM's limit; a little below 2**16 for tokens added later
_BLOCK = 1 << 20  # entries written at a time

REMEDY = "prepare the data again, for example with tools/preprocess_data.py"
"""End of an error message: what to do about a damaged file."""


def token_dtype(vocab_size: int) -> np.dtype[np.integer[Any]]:
    """The dtype in which Megatron-LM stores ids of a vocabulary of ``vocab_size`` entries."""
    return np.dtype("<u2" if vocab_size < _UINT16_VOCABULARY else "<i4")


class Sequences(NamedTuple):
    """How consecutive tokens make sequences, and how consecutive sequences make documents.

    Attributes:
        lengths: tokens of each sequence, int32 [n].
        documents: first sequence of each document and, last, n; int64 [d + 1].
    """

    lengths: NDArray[np.int32]
    documents: NDArray[np.int64]


@dataclass(frozen=True)
class Index:
    """A whole index, mapped.

    Attributes:
        dtype: dtype of the token ids.
        sequences: lengths of the sequences, and bounds of the documents.
        pointers: byte position of each sequence in ``.bin``, int64 [n].
    """

    dtype: np.dtype[np.integer]
    sequences: Sequences
    pointers: NDArray[np.int64]


def write_index(path: Path, dtype: np.dtype[np.integer], parts: Sequence[Sequences]) -> None:
    """Write the index of sequences that are given in parts, without copying whole arrays.

    ``dtype`` is the little-endian dtype of the token ids.
    """
    code = next(code for code, name in _DTYPES.items() if np.dtype(name) == dtype)
    sequences = sum(len(part.lengths) for part in parts)
    boundaries = sum(len(part.documents) - 1 for part in parts) + 1
    with path.open("wb") as file:
        file.write(_HEADER.pack(_MAGIC, _VERSION, code, sequences, boundaries))
        for part in parts:
            for lengths in _blocks(part.lengths):
                file.write(lengths.astype("<i4", copy=False).tobytes())
        end = 0
        for part in parts:
            for lengths in _blocks(part.lengths):
                sizes = lengths.astype("<i8") * dtype.itemsize
                ends = np.cumsum(sizes) + end
                file.write((ends - sizes).tobytes())
                end = int(ends[-1])
        file.write(np.zeros(1, "<i8").tobytes())
        first = 0
        for part in parts:
            for documents in _blocks(part.documents[1:]):
                file.write((documents.astype("<i8", copy=False) + first).tobytes())
            first += len(part.lengths)


def _blocks(array: NDArray[Any]) -> Iterator[NDArray[Any]]:
    for start in range(0, len(array), _BLOCK):
        yield array[start : start + _BLOCK]


def read_index(path: Path) -> Index:
    """Map the file ``path`` and split it into its arrays; an incomplete index is refused.

    Raises:
        ValueError: the file is foreign, of another version, or its size contradicts its header.
    """
    size = path.stat().st_size
    with open_file(path) as file:
        head = file.read(_HEADER.size)
    if not head.startswith(_MAGIC):
        raise ValueError(
            f"{path} is no Megatron-LM index: it starts with {head[:9]!r} instead of {_MAGIC!r}; "
            f"point --data-path at a .bin/.idx pair, or {REMEDY}"
        )
    if len(head) < _HEADER.size:
        raise ValueError(f"{path} is truncated: {size} bytes, less than its header; {REMEDY}")
    _, version, code, sequences, boundaries = _HEADER.unpack(head)
    if version != _VERSION:
        raise ValueError(f"{path} has version {version}, this reads {_VERSION}; {REMEDY}")
    if code not in _DTYPES:
        found = _FLOAT_DTYPES.get(code, "unknown")
        raise ValueError(
            f"{path} has dtype code {code} ({found}), token ids need one of {sorted(_DTYPES)}; "
            f"{REMEDY}"
        )
    expected = _HEADER.size + 12 * sequences + 8 * boundaries
    if size != expected:
        kind = "truncated" if size < expected else "too long"
        raise ValueError(
            f"{path} is {kind}: {size} bytes where {sequences} sequences and {boundaries} document "
            f"boundaries need {expected}; copy it again or {REMEDY}"
        )
    raw = map_bytes(path)
    lengths, pointers, documents = np.split(
        raw[_HEADER.size :], [4 * sequences, 12 * sequences], axis=0
    )
    made = Sequences(lengths.view("<i4"), documents.view("<i8"))
    return Index(np.dtype(_DTYPES[code]), made, pointers.view("<i8"))


def map_bytes(path: Path) -> NDArray[np.uint8]:
    """Map a whole file as a plain array: a view of ``np.memmap`` costs a microsecond more."""
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.empty(0, np.uint8)
    return np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
