"""Reads what may be damaged without the code under test: by NumPy, and by libraries."""

import base64
import gzip
import io
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import tiktoken
import tokenizers
import zstandard
from data import raw_text
from harness.small_vocabularies import TEXTS
from sentencepiece import SentencePieceProcessor

from megatron.data.tokenizers.byte_pairs import PATTERNS

Pair = tuple[list[list[int]], list[int]]
"""Sequences, and the number of the first one of each document."""

_CODES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def pair(folder: Path) -> Pair:
    """The sequences of ``x.bin`` by the places that ``x.idx`` gives."""
    index, tokens = (folder / "x.idx").read_bytes(), (folder / "x.bin").read_bytes()
    _, _, code, count, documents = struct.unpack_from("<9sQBQQ", index)
    lengths = np.frombuffer(index, "<i4", count, 34)
    places = np.frombuffer(index, "<i8", count, 34 + 4 * count)
    first = np.frombuffer(index, "<i8", documents, 34 + 12 * count)
    found = [
        np.frombuffer(tokens, _CODES[code], length, place).tolist()
        for length, place in zip(lengths.tolist(), places.tolist(), strict=True)
    ]
    return found, first.tolist()


def pieces(folder: Path) -> list[list[int]]:
    """The ids that sentencepiece gives."""
    processor = SentencePieceProcessor(model_file=str(folder / "x.model"))
    return [list(processor.encode(text)) for text in TEXTS]


def tik(folder: Path) -> list[list[int]]:
    """The ids that tiktoken gives, above 1000 special tokens."""
    entries = json.loads((folder / "x.model").read_text(encoding="utf-8"))
    ranks = {base64.b64decode(one["token_bytes"]): one["rank"] + 1000 for one in entries}
    made = tiktoken.Encoding("x", pat_str=PATTERNS["v2"], mergeable_ranks=ranks, special_tokens={})
    return [made.encode_ordinary(text) for text in TEXTS]


def gpt2(folder: Path) -> list[list[int]]:
    """The ids that the package tokenizers gives for GPT-2's two files."""
    made = tokenizers.ByteLevelBPETokenizer.from_file(
        str(folder / "vocab.json"), str(folder / "merges.txt")
    )
    return [made.encode(text).ids for text in TEXTS]


def hugging_face(folder: Path) -> list[list[int]]:
    """The ids that the package tokenizers gives for a folder."""
    made = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [made.encode(text, add_special_tokens=False).ids for text in TEXTS]


def text_pair(folder: Path) -> tuple[bytes, bytes]:
    """The files that raw text should become, bad lines left out."""
    content = (folder / "in").read_bytes()
    if content[:4] == b"PAR1":
        rows = pyarrow.parquet.read_table(folder / "in", columns=["text"])["text"].to_pylist()
    else:
        rows = [_text_of(line) for line in _decompressed(content).split(b"\n")]
    return raw_text.expected([row for row in rows if _is_good(row)])


def _decompressed(content: bytes) -> bytes:
    if content[:2] == b"\x1f\x8b":
        return gzip.decompress(content)
    if content[:4] == b"\x28\xb5\x2f\xfd":
        reader = zstandard.ZstdDecompressor()
        return reader.stream_reader(io.BytesIO(content), read_across_frames=True).read()
    return content


def _text_of(line: bytes) -> Any:
    try:
        return json.loads(line.decode())["text"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _is_good(text: Any) -> bool:
    """Whether a record's text is made of numbers of the vocabulary."""
    texts = [text] if isinstance(text, str) else text
    if not isinstance(texts, list) or not all(isinstance(own, str) for own in texts):
        return False
    try:
        ids = [int(word) for own in texts for word in own.split()]
    except ValueError:
        return False
    return all(0 <= index <= raw_text.VOCABULARY for index in ids)
