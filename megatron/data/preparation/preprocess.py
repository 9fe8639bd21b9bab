"""Turns raw text into token files: workers encode it, this process writes it in input order.

A run that was killed goes on from its last saved state.
"""

import errno
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from megatron.data.index_file import token_dtype
from megatron.data.preparation.encode import EncodeConfig, Encoded, encode, preload
from megatron.data.preparation.text_files import Block, blocks
from megatron.data.preparation.unfinished import State, Unfinished, held, read_state
from megatron.data.preparation.workers import in_order
from megatron.data.tokenizers.settings import TokenizerSettings
from megatron.native.files import read_bytes

SAVE_SECONDS: Final = 10.0
"""Seconds between two saved states from which a killed run can go on."""


MOST_WORKERS: Final = 1024
"""Most processes that encode; a larger number is surely mistyped."""


@dataclass(frozen=True)
class PreprocessConfig:
    """Inputs, outputs and workers of a run.

    Attributes:
        inputs: files, in the order in which they are read.
        output_prefix: prefix of the files ``PREFIX_KEY_document.bin`` and ``.idx``; with sentences
            ``PREFIX_KEY_sentence``.
        encode: how a record becomes token ids.
        workers: processes that encode.
        is_strict: whether the first bad line ends the run.
        restarts: whether the files of an unfinished run are thrown away.
        save_seconds: seconds between two saved states from which a killed run can go on.
    """

    inputs: tuple[Path, ...]
    output_prefix: Path
    encode: EncodeConfig
    workers: int = 1
    is_strict: bool = False
    restarts: bool = False
    save_seconds: float = SAVE_SECONDS

    @property
    def prefixes(self) -> dict[str, Path]:
        """The prefix of each key's files."""
        level = "sentence" if self.encode.sentences else "document"
        return {key: Path(f"{self.output_prefix}_{key}_{level}") for key in self.encode.keys}

    @property
    def folder(self) -> Path:
        """Folder of the files until the run is finished."""
        return Path(f"{self.output_prefix}.unfinished")


@dataclass(frozen=True)
class Status:
    """How far a run has come.

    Attributes:
        done_bytes: bytes of the input files whose records are written.
        total_bytes: bytes of all input files.
        documents: records that became documents.
        tokens: ids written.
        bad: records that could not become documents.
        told: descriptions of the first bad records.
    """

    done_bytes: int
    total_bytes: int
    documents: int
    tokens: int
    bad: int
    told: tuple[str, ...]


def preprocess(config: PreprocessConfig, report: Callable[[Status], None]) -> Status:
    """Write the token files of raw text.

    The files depend only on the inputs and on ``config.encode``. They are the same for any number
    of workers, and for a run that was killed and resumed.

    Raises:
        ValueError: an input, the tokenizer or the output cannot be used; there is no room; or a bad
            line ends a strict run; or there is no record.
    """
    _check(config)
    dtype = token_dtype(preload(config.encode))
    try:
        with held(config.folder):
            return _preprocess(config, dtype, report)
    except OSError as error:
        raise ValueError(
            f"--output-prefix {config.output_prefix} cannot be written ({error}): "
            + (
                "make room; the same command goes on where this one was"
                if error.errno in (errno.ENOSPC, errno.EDQUOT)
                else "give another one"
            )
        ) from error


def _check(config: PreprocessConfig) -> None:
    for path in config.inputs:
        if not path.is_file():
            raise ValueError(f"--input {path} is not a file; give JSON lines or parquet files")
    for key in config.encode.keys:
        if not key or "/" in key or "\0" in key or config.encode.keys.count(key) > 1:
            raise ValueError(
                f"--json-keys {' '.join(config.encode.keys)}: {key!r} cannot be part of a file's "
                "name, or stands there twice; give other keys"
            )
    if not config.output_prefix.absolute().parent.is_dir():
        raise ValueError(
            f"--output-prefix {config.output_prefix}: its folder does not exist; make it"
        )
    if not 1 <= config.workers <= MOST_WORKERS:
        raise ValueError(f"--workers {config.workers}: give 1 to {MOST_WORKERS}")


def _preprocess(
    config: PreprocessConfig, dtype: np.dtype[np.integer], report: Callable[[Status], None]
) -> Status:
    sizes = [path.stat().st_size for path in config.inputs]
    state = _begin(config)
    files = Unfinished(config.folder, config.prefixes, dtype, state)

    def status(file_bytes: int = 0) -> Status:
        counts = (state.documents, state.tokens, state.bad, tuple(state.told))
        return Status(state.done_bytes + file_bytes, sum(sizes), *counts)

    try:
        report(status())
        saved = time.monotonic()
        results = in_order(partial(_work, config.encode), _items(config, state), config.workers)
        for item, made in results:
            while state.file < item.file:
                state.next_file(sizes[state.file])
            state.add(config.inputs[item.file], made)
            if state.bad and config.is_strict:
                raise ValueError(f"--strict: {state.told[0]}; mend it, or leave --strict out")
            files.append(made.tokens)
            state.position = item.block.end
            if time.monotonic() - saved >= config.save_seconds:
                files.save()
                saved = time.monotonic()
            report(status(item.block.file_bytes))
        while state.file < len(sizes):
            state.next_file(sizes[state.file])
        if not state.tokens:
            files.discard()
            raise ValueError(_nothing(config, state))
        files.finish()
    except KeyboardInterrupt:
        files.save()
        raise
    finally:
        files.close()
    return status()


def _nothing(config: PreprocessConfig, state: State) -> str:
    """Return the error message for input without a good record, or without a token."""
    if state.documents:
        return (
            f"--input {' '.join(map(str, config.inputs))}: the tokenizer makes no token of its "
            f"{state.documents:,} documents: give files with text under --json-keys "
            f"{' '.join(config.encode.keys)}, or another tokenizer"
        )
    bad = f" (bad lines: {state.bad:,}, the first: {state.told[0]})" if state.bad else ""
    return (
        f"--input {' '.join(map(str, config.inputs))}: there is no document in it{bad}; give files "
        f"whose records have text under --json-keys {' '.join(config.encode.keys)}"
    )


@dataclass(frozen=True)
class _Item:
    file: int
    block: Block


def _work(config: EncodeConfig, item: _Item) -> Encoded:
    return encode(config, item.block)


def _items(config: PreprocessConfig, state: State) -> Iterator[_Item]:
    first, start = state.file, state.position
    for number in range(first, len(config.inputs)):
        for block in blocks(
            config.inputs[number], config.encode.keys, start if number == first else 0
        ):
            yield _Item(number, block)


def _begin(config: PreprocessConfig) -> State:
    """Return the saved state of an unfinished run, or the state of a new run."""
    settings = dict(_settings(config))
    left = None if config.restarts else read_state(config.folder)
    if left is None:
        for path in config.folder.iterdir():
            path.unlink()
        return State(settings)
    changed = [name for name, value in settings.items() if left.settings.get(name) != value]
    if changed or left.settings.keys() != settings.keys():
        raise ValueError(
            f"{config.folder} is of a run that was ended and had another "
            f"{changed[0] if changed else 'setting'}: give what it had and it goes on, start anew "
            "with --restart, or give another --output-prefix"
        )
    return left


def _settings(config: PreprocessConfig) -> Iterator[tuple[str, str]]:
    """Yield the flag and the value of every setting that the files depend on."""
    for number, path in enumerate(config.inputs):
        stat = path.stat()
        yield f"--input {number + 1}", f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}"
    yield "--json-keys", " ".join(config.encode.keys)
    yield "--append-eod", str(config.encode.append_eod)
    yield "--split-sentences", repr(config.encode.sentences)
    for field in fields(TokenizerSettings):
        value = getattr(config.encode.tokenizer, field.name)
        name = "--" + field.name.replace("_", "-")
        yield name, _digest(value) if isinstance(value, Path) else repr(value)


def _digest(path: Path) -> str:
    """Return a hash of a tokenizer's file, or of the JSON files in its folder."""
    files: Sequence[Path] = sorted(path.glob("*.json")) if path.is_dir() else [path]
    parts = [hashlib.sha256(read_bytes(file)).hexdigest() for file in files]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
