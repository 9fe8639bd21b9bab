"""Turns a block of records into token ids: the work of one worker."""

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

import numpy as np

from megatron.data.index_file import token_dtype
from megatron.data.preparation.sentences import SentenceConfig, splitter
from megatron.data.preparation.text_files import Block
from megatron.data.tokenizers.build import build_tokenizer
from megatron.data.tokenizers.settings import TokenizerSettings

TOLD: Final = 10
"""Number of bad lines that messages describe."""


@dataclass(frozen=True)
class EncodeConfig:
    """How a record becomes token ids.

    Attributes:
        tokenizer: the tokenizer that turns text into ids.
        keys: keys of a record that hold text; each key has output files of its own.
        append_eod: whether a document ends with the end-of-document token.
        sentences: how text is cut into sentences; ``None``: text stays whole.
    """

    tokenizer: TokenizerSettings
    keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    sentences: SentenceConfig | None = None


@dataclass
class Tokens:
    """The documents of one key.

    Attributes:
        ids: the token ids in the dtype of the output files, as bytes.
        lengths: number of ids in each sequence, int32, as bytes.
        counts: number of sequences in each document, int32, as bytes.
    """

    ids: bytes
    lengths: bytes
    counts: bytes


@dataclass
class Encoded:
    """The token ids of a block, and counts of its records.

    Attributes:
        tokens: the documents of each key.
        lines: records in the block, bad and blank ones included.
        documents: records that became documents.
        bad: records that could not become documents.
        told: the first bad records: the line in the block, from 0, and the reason.
    """

    tokens: dict[str, Tokens] = field(default_factory=dict)
    lines: int = 0
    documents: int = 0
    bad: int = 0
    told: list[tuple[int, str]] = field(default_factory=list)


def encode(config: EncodeConfig, block: Block) -> Encoded:
    """Encode a block; the tokenizer is made once per process."""
    return _encoder(config)(block)


def preload(config: EncodeConfig) -> int:
    """Make the tokenizer, and return the size of its vocabulary.

    Raises:
        ValueError: the tokenizer cannot be made.
    """
    return _encoder(config).vocab_size


@cache
def _encoder(config: EncodeConfig) -> "_Encoder":
    return _Encoder(config)


class _BadRecordError(Exception):
    """A record that makes no document."""


class _Encoder:
    def __init__(self, config: EncodeConfig) -> None:
        self._config = config
        self._tokenizer = build_tokenizer(config.tokenizer)
        self._split = splitter(config.sentences) if config.sentences else None
        self.vocab_size = self._tokenizer.vocab_size
        self._dtype = np.dtype(token_dtype(self.vocab_size)).newbyteorder("<")

    def __call__(self, block: Block) -> Encoded:
        """Encode all texts of the block at once, without the records that cannot be encoded."""
        made = Encoded()
        records = list(self._records(block, made))
        sentences = [s for record in records for texts in record[1] for s in texts]
        try:
            ids = self._tokenizer.tokenize_all(sentences)
        except (ValueError, TypeError, RuntimeError):
            records = [record for record in records if self._can_encode(record, made)]
            sentences = [s for record in records for texts in record[1] for s in texts]
            ids = self._tokenizer.tokenize_all(sentences)
        made.documents = len(records)
        self._collect([texts for _, texts in records], iter(ids), made)
        made.bad = len(made.told)
        made.told = sorted(made.told)[:TOLD]
        return made

    def _records(self, block: Block, made: Encoded) -> Iterator[tuple[int, list[list[str]]]]:
        """Yield for each good record its line number and its sentences by key."""
        for line, content in _contents(block.records):
            made.lines = line + 1
            if isinstance(content, bytes) and not content.strip():
                continue
            try:
                record = _parsed(content) if isinstance(content, bytes) else content
                yield line, [self._sentences(record, key) for key in self._config.keys]
            except _BadRecordError as error:
                made.told.append((line, str(error)))

    def _sentences(self, record: Mapping[str, Any], key: str) -> list[str]:
        if key not in record:
            raise _BadRecordError(f"has no key {key!r}")
        texts = record[key]
        if isinstance(texts, str):
            texts = self._split(texts) if self._split else [texts]
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise _BadRecordError(f"has {type(record[key]).__name__} at {key!r}, not a text")
        try:
            for text in texts:
                text.encode()
        except UnicodeEncodeError as error:
            raise _BadRecordError(f"has half a surrogate pair in {key!r}") from error
        return texts

    def _can_encode(self, record: tuple[int, list[list[str]]], made: Encoded) -> bool:
        line, keys = record
        try:
            self._tokenizer.tokenize_all([text for texts in keys for text in texts])
        except (ValueError, TypeError, RuntimeError) as error:
            made.told.append((line, f"cannot be encoded: {error}"))
            return False
        return True

    def _collect(
        self, records: Sequence[list[list[str]]], ids: Iterator[list[int]], made: Encoded
    ) -> None:
        """Collect the ids of all sentences by key; sentences without ids are left out."""
        keys = self._config.keys
        code = _CODES[self._dtype.itemsize]
        tokens: dict[str, array[int]] = {key: array(code) for key in keys}
        lengths = {key: array("i") for key in keys}
        counts = {key: array("i") for key in keys}
        end = [self._tokenizer.eod] if self._config.append_eod else []
        for record in records:
            for key, texts in zip(keys, record, strict=True):
                found = [sequence for sequence in (next(ids) for _ in texts) if sequence]
                for number, sequence in enumerate(found, 1):
                    if number == len(found):
                        sequence = sequence + end
                    tokens[key].extend(sequence)
                    lengths[key].append(len(sequence))
                counts[key].append(len(found))
        for key in keys:
            made.tokens[key] = Tokens(
                np.asarray(tokens[key]).astype(self._dtype, copy=False).tobytes(),
                np.asarray(lengths[key]).astype("<i4", copy=False).tobytes(),
                np.asarray(counts[key]).astype("<i4", copy=False).tobytes(),
            )


_CODES = {2: "H", 4: "i"}
"""Type codes of ``array``, by the bytes of a number."""


def _contents(
    records: bytes | Mapping[str, Sequence[object]],
) -> Iterator[tuple[int, bytes | Mapping[str, Any]]]:
    if isinstance(records, bytes):
        yield from enumerate(records.removesuffix(b"\n").split(b"\n"))
    else:
        rows = zip(*records.values(), strict=True)
        yield from enumerate(dict(zip(records, row, strict=True)) for row in rows)


def _parsed(line: bytes) -> Mapping[str, Any]:
    try:
        # Some editors begin a file with a byte order mark, and `cat` keeps the marks when it joins
        # files.
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise _BadRecordError(f"is no UTF-8 at its byte {error.start + 1}") from error
    except json.JSONDecodeError as error:
        raise _BadRecordError(
            f"is no JSON: {error.msg} at its character {error.pos + 1}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise _BadRecordError(f"is no JSON: {error}") from error
    if not isinstance(record, dict):
        raise _BadRecordError(f"holds {type(record).__name__}, not an object")
    return record
