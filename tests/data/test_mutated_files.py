"""200 damaged inputs: each is read right, or told in one line that names the file and a way out.

What is damaged: indices, tokens, the files of every kind of tokenizer, and raw text in every form.
``harness.damage`` has the ways. What is read in spite of its damage is what an independent reader
finds in the damaged files, so nothing is read wrong in silence; and nothing takes long.
"""

import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from data import independent_readers, raw_text
from harness.damage import damage, within
from harness.small_vocabularies import (
    TEXTS,
    gpt2_files,
    hugging_face_folder,
    sentencepiece_model,
    tiktoken_file,
)

from megatron.data.indexed import IndexedDataset
from megatron.data.preparation.index_merge import merge
from megatron.data.preparation.preprocess import PreprocessConfig, Status, preprocess
from megatron.data.tokenizers.build import build_tokenizer
from megatron.data.tokenizers.settings import TokenizerSettings

COUNT = 200
RAW = raw_text.numbers(120)
Reader = Callable[[Path], Any]
"""Returns what stands in a folder."""
PATIENCE = 20
"""Seconds that reading a damaged input may take."""

WAYS_OUT = re.compile(r"give |copy |prepare |name one")


def _pair(folder: Path) -> None:
    tokens, index = raw_text.expected(RAW)
    (folder / "x.bin").write_bytes(tokens)
    (folder / "x.idx").write_bytes(index)


def _read(prefix: Path) -> independent_readers.Pair:
    dataset = IndexedDataset(prefix)
    sequences = [dataset[n].tolist() for n in range(len(dataset))]
    return sequences, dataset.document_indices.tolist()


def _read_pair(folder: Path) -> independent_readers.Pair:
    return _read(folder / "x")


def _merge_pair(folder: Path) -> independent_readers.Pair:
    merge([folder / "x", folder / "x"], folder / "y")
    return _read(folder / "y")


def _twice(folder: Path) -> independent_readers.Pair:
    sequences, documents = independent_readers.pair(folder)
    return 2 * sequences, [*documents, *(len(sequences) + first for first in documents[1:])]


def _encoder(config: Callable[[Path], TokenizerSettings]) -> Reader:
    def read(folder: Path) -> list[list[int]]:
        tokenizer = build_tokenizer(config(folder))
        found = tokenizer.tokenize_all(TEXTS)
        assert all(0 <= index < tokenizer.vocab_size for ids in found for index in ids)
        return found

    return read


def _read_text(folder: Path) -> tuple[bytes, bytes]:
    config = PreprocessConfig((folder / "in",), folder / "out", raw_text.settings(), restarts=True)
    done: list[Status] = []
    status = preprocess(config, done.append)
    dataset = IndexedDataset(folder / "out_text_document")
    assert len(dataset.document_indices) - 1 == status.documents
    assert len(status.told) == min(status.bad, 10)
    made = folder / "out_text_document"
    return made.with_suffix(".bin").read_bytes(), made.with_suffix(".idx").read_bytes()


def _raw(form: str) -> Callable[[Path], None]:
    return lambda folder: raw_text.FORMS[form](folder / "in", RAW)


def _model(name: str) -> Callable[[Path], TokenizerSettings]:
    return lambda folder: TokenizerSettings(name, folder / "x.model")


def _gpt2(folder: Path) -> TokenizerSettings:
    return TokenizerSettings(
        "GPT2BPETokenizer", vocab_file=folder / "vocab.json", merge_file=folder / "merges.txt"
    )


class Kind(NamedTuple):
    """A kind of input: writes a sound one, reads one, and reads one with other code."""

    write: Callable[[Path], object]
    read: Reader
    independent: Reader


def _pieces(name: str) -> Kind:
    return Kind(
        lambda folder: sentencepiece_model(folder / "x.model"),
        _encoder(_model(name)),
        independent_readers.pieces,
    )


KINDS: dict[str, Kind] = {
    "pair": Kind(_pair, _read_pair, independent_readers.pair),
    "merge": Kind(_pair, _merge_pair, _twice),
    "sentencepiece": _pieces("GPTSentencePieceTokenizer"),
    "bert": _pieces("SentencePieceTokenizer"),
    "tiktoken": Kind(
        lambda folder: tiktoken_file(folder / "x.model"),
        _encoder(_model("TikTokenizer")),
        independent_readers.tik,
    ),
    "gpt2": Kind(gpt2_files, _encoder(_gpt2), independent_readers.gpt2),
    "hugging-face": Kind(
        hugging_face_folder,
        _encoder(lambda folder: TokenizerSettings("HuggingFaceTokenizer", folder)),
        independent_readers.hugging_face,
    ),
    **{
        form: Kind(_raw(form), _read_text, independent_readers.text_pair) for form in raw_text.FORMS
    },
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of sound files for every kind."""
    root = tmp_path_factory.mktemp("sound")
    for name, kind in KINDS.items():
        (root / name).mkdir()
        kind.write(root / name)
    return root


def told(error: Exception, folder: Path) -> bool:
    """Whether an error is of a user's kind, in one line, and names the file and a way out."""
    message = str(error)
    is_line = "\n" not in message.strip()
    return is_line and str(folder) in message and bool(WAYS_OUT.search(message))


@pytest.mark.parametrize("kind", KINDS)
def test_sound_files_are_read(sound: Path, kind: str, tmp_path: Path) -> None:
    shutil.copytree(sound / kind, tmp_path, dirs_exist_ok=True)
    assert KINDS[kind].read(tmp_path) == KINDS[kind].independent(tmp_path)


@pytest.mark.parametrize("part", range(10))
def test_damage_is_read_right_or_told(sound: Path, tmp_path: Path, part: int) -> None:
    others = sorted(path for path in sound.rglob("*") if path.is_file())
    wrong = {}
    for number in range(part * COUNT // 10, (part + 1) * COUNT // 10):
        name = list(KINDS)[number % len(KINDS)]
        folder = tmp_path / f"{number}-{name}"
        shutil.copytree(sound / name, folder)
        done = damage(folder, others, random.Random(number))
        try:
            with within(PATIENCE):
                found = KINDS[name].read(folder)
        except (ValueError, FileNotFoundError) as error:
            if not told(error, folder):
                wrong[number, done] = str(error)
        else:
            expected = KINDS[name].independent(folder)
            if found != expected:
                wrong[number, done] = f"{found} instead of {expected}"
    assert not wrong
