"""Raw text of numbers for NullTokenizer, in every form, and what Megatron-LM makes of it."""

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import zstandard

from megatron.data.preparation.encode import EncodeConfig
from megatron.data.tokenizers.settings import TokenizerSettings

VOCABULARY = 1000
Text = str | list[str]


def numbers(documents: int, vocabulary: int = VOCABULARY) -> list[Text]:
    """Texts of 0 to 12 numbers; every fifth is a list of such, as a text cut into sentences."""

    def text(seed: int) -> str:
        return " ".join(str((seed * 7919 + 31 * n) % vocabulary) for n in range(seed * seed % 13))

    return [
        [text(seed), "", text(seed + 1)] if seed % 5 == 0 else text(seed)
        for seed in range(documents)
    ]


def settings(append_eod: bool = True, vocabulary: int = VOCABULARY) -> EncodeConfig:
    return EncodeConfig(
        TokenizerSettings("NullTokenizer", vocab_size=vocabulary), append_eod=append_eod
    )


def lines(texts: Sequence[Text]) -> bytes:
    return b"".join(json.dumps({"text": text, "id": 5}).encode() + b"\n" for text in texts)


def _halves(compress: Callable[[bytes], bytes], content: bytes) -> bytes:
    """Two members or frames, as ``cat`` makes them of two files."""
    middle = len(content) // 2
    return compress(content[:middle]) + compress(content[middle:])


def write_plain(path: Path, texts: Sequence[Text]) -> None:
    path.write_bytes(lines(texts))


def write_gzip(path: Path, texts: Sequence[Text]) -> None:
    path.write_bytes(_halves(gzip.compress, lines(texts)))


def write_zstandard(path: Path, texts: Sequence[Text]) -> None:
    path.write_bytes(_halves(zstandard.ZstdCompressor().compress, lines(texts)))


def write_parquet(path: Path, texts: Sequence[Text]) -> None:
    column = pyarrow.array([[text] if isinstance(text, str) else text for text in texts])
    table = pyarrow.table({"other": list(range(len(texts))), "text": column})
    pyarrow.parquet.write_table(table, path, row_group_size=70)


FORMS: dict[str, Callable[[Path, Sequence[Text]], None]] = {
    "plain": write_plain,
    "gzip": write_gzip,
    "zstandard": write_zstandard,
    "parquet": write_parquet,
}


def expected(
    texts: Sequence[Text], append_eod: bool = True, vocabulary: int = VOCABULARY
) -> tuple[bytes, bytes]:
    """``.bin`` and ``.idx`` as Megatron-LM's documentation has them, without the code under test.

    A sentence without ids leaves no sequence, and a text without ids is a document without any.
    """
    dtype, code = ("<u2", 8) if vocabulary + 1 < 65500 else ("<i4", 4)
    body, lengths, documents = b"", [], [0]
    for text in texts:
        sequences = [
            [int(word) for word in sentence.split()]
            for sentence in ([text] if isinstance(text, str) else text)
        ]
        sequences = [sequence for sequence in sequences if sequence]
        if sequences and append_eod:
            sequences[-1].append(vocabulary)
        for sequence in sequences:
            body += np.array(sequence, dtype).tobytes()
            lengths.append(len(sequence))
        documents.append(len(lengths))
    ends = np.cumsum([0, *lengths]) * np.dtype(dtype).itemsize
    head = b"MMIDIDX\0\0" + (1).to_bytes(8, "little") + bytes([code])
    head += len(lengths).to_bytes(8, "little") + len(documents).to_bytes(8, "little")
    arrays = (
        np.array(lengths, "<i4"),
        ends[:-1].astype("<i8"),
        np.array(documents, "<i8"),
    )
    return body, head + b"".join(array.tobytes() for array in arrays)
