"""Makes a tokenizer and token files from text, in one folder that is complete or absent.

The tokenizer is a byte-pair encoding that encodes rare characters as bytes and keeps every blank
and line end. So decoding gives the text back, except U+2581, which is sentencepiece's sign for a
blank. Documents end with ``</s>``, a control token that no text is encoded to.
"""

import errno
import io
import re
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from megatron.data.corpus import Corpus
from megatron.data.indexed import IndexedWriter
from megatron.native.files import locked, temporary_name

Progress = Callable[[str, int, int | None], None]
"""Called with the name of a step, its finished work and its total work (``None``: unknown)."""

_TRAINING_BYTES = 64 << 20  # more text takes more time and hardly changes the pieces
_CHUNK = 4096  # characters; the trainer fails on words of 65536 and skips lines that long
_BATCH_BYTES = 1 << 20
_UNUSED = 5  # SentencePiece.Type in sentencepiece's model format


def prepare(
    corpus: Corpus, vocab_size: int, cache: Path, progress: Progress, num_threads: int = 1
) -> Path:
    """Makes a tokenizer of ``vocab_size`` entries, bytes included, and the corpus's token files.

    Returns:
        A folder with ``tokenizer.model``, ``text_document.bin`` and ``text_document.idx``. If the
        folder exists, the call returns at once; if another process is making it, the call waits.

    Raises:
        ValueError: the corpus holds no text, or more different characters than ``vocab_size``; or
            there is no room in ``cache``.
    """
    try:
        return _prepare(corpus, vocab_size, cache, progress, num_threads)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ValueError(
            f"{cache} has no room for {corpus.num_bytes / 1e6:.0f} MB of text and as many of token "
            f"files ({error.strerror}): make room, or name another folder with --cache or "
            "MEGATRON_CACHE; nothing was kept"
        ) from error


def _prepare(
    corpus: Corpus, vocab_size: int, cache: Path, progress: Progress, num_threads: int
) -> Path:
    thousands, rest = divmod(vocab_size, 1000)
    target = cache / f"{corpus.name}-{vocab_size if rest else f'{thousands}k'}"
    if target.is_dir():
        return target
    with locked(cache / f".{target.name}.lock"):
        if target.is_dir():
            return target
        # Only the lock's holder works here, so these files were left by a killed process.
        for stale in cache.glob(f".{target.name}.*-*"):
            shutil.rmtree(stale)
        folder = temporary_name(target)
        folder.mkdir()
        try:
            model = train_tokenizer(corpus, vocab_size, progress)
            (folder / "tokenizer.model").write_bytes(model)
            tokenise(corpus, model, folder / "text_document", progress, num_threads)
            folder.rename(target)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return target


def train_tokenizer(corpus: Corpus, vocab_size: int, progress: Progress) -> bytes:
    """Trains a byte-pair encoding on at most 64 MB, taken evenly from the corpus.

    Args:
        corpus: the text.
        vocab_size: entries of the model: ``<unk> <s> </s>``, the line feed, 256 bytes, pieces, and
            ``<unusedN>`` where the text has too few different words for that many pieces.
        progress: told about the text read.

    Returns:
        A serialized sentencepiece model of exactly ``vocab_size`` entries.

    Raises:
        ValueError: the corpus holds no text, or more different characters than ``vocab_size``.
    """
    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=_training_lines(corpus, progress),
            model_writer=model,
            vocab_size=vocab_size,
            hard_vocab_limit=False,
            model_type="bpe",
            byte_fallback=True,
            # Rare characters are encoded as bytes. If each had an entry, a script of many
            # characters could fill the vocabulary.
            character_coverage=0.9999,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            user_defined_symbols=["\n"],
            max_sentence_length=1 << 30,
            minloglevel=2,
        )
    except RuntimeError as error:
        if (fault := _fault_of_text(str(error), corpus, vocab_size)) is not None:
            raise ValueError(fault) from error
        raise
    return _filled(model.getvalue(), vocab_size)


def _fault_of_text(message: str, corpus: Corpus, vocab_size: int) -> str | None:
    """Return a fault of the text in words, from sentencepiece's; ``None``: it is another fault."""
    if "sentences_.empty()" in message:
        return f"{corpus.paths[0]}: there is no text in it, only line ends"
    if needed := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        return (
            f"a vocabulary of {vocab_size} is too small: bytes, special tokens and the characters "
            f"of this text take {needed[1]} entries; give at least that many"
        )
    return None


def unused_pieces(model: Path) -> int:
    """Count the ``<unusedN>`` pieces, which only fill a tokenizer up to its size.

    Args:
        model: a file that ``prepare`` has made; the unused pieces come last in it.
    """
    processor = SentencePieceProcessor(model_file=str(model))
    size = processor.vocab_size()
    return next((n for n in range(size) if not processor.is_unused(size - 1 - n)), size)


def tokenise(
    corpus: Corpus, model: bytes, prefix: Path, progress: Progress, num_threads: int
) -> None:
    """Writes every non-empty document, ended by ``</s>``, to ``PREFIX.bin`` and ``PREFIX.idx``."""
    processor = SentencePieceProcessor()
    processor.load_from_serialized_proto(model)
    end = processor.eos_id()
    done = 0
    with IndexedWriter(prefix, processor.vocab_size()) as writer:
        for batch in _batches(corpus):
            for ids in processor.encode(batch, num_threads=num_threads):
                writer.add_document(np.asarray([*ids, end]))
            done += sum(len(document.encode()) for document in batch)
            progress("tokenising", min(done, corpus.num_bytes), corpus.num_bytes)


def _training_lines(corpus: Corpus, progress: Progress) -> Iterator[str]:
    stride = -(-corpus.num_bytes // _TRAINING_BYTES)
    done = 0
    for number, document in enumerate(corpus.documents()):
        done += len(document.encode())
        progress("reading text", min(done, corpus.num_bytes), corpus.num_bytes)
        if number % stride == 0:
            for line in document.split("\n"):
                for start in range(0, len(line), _CHUNK):
                    yield line[start : start + _CHUNK]
    progress("training the tokenizer", 0, None)


def _batches(corpus: Corpus) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for document in corpus.documents():
        if document:
            batch.append(document)
            size += len(document)
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _filled(model: bytes, vocab_size: int) -> bytes:
    """Appends unused pieces up to ``vocab_size``.

    A model is a protobuf message whose field 1 repeats a piece (string 1, score 2, type 3), and
    protobuf messages may be extended by appending further repetitions.
    """
    processor = SentencePieceProcessor()
    processor.load_from_serialized_proto(model)
    missing = vocab_size - processor.vocab_size()
    parts = [model]
    for number in range(missing):
        name = f"<unused{number}>".encode()
        piece = b"\x0a" + bytes([len(name)]) + name
        piece += b"\x15" + struct.pack("<f", 0.0) + b"\x18" + bytes([_UNUSED])
        parts.append(b"\x0a" + bytes([len(piece)]) + piece)
    return b"".join(parts)
