"""200 damaged inputs: each is read, or told in one line that names the file and a way out.

What is damaged: indices, tokens, the files of every kind of tokenizer, and raw text in every form.
How: cut short, bits turned over, halves swapped, emptied, put in another file's place, or missing.
The damage follows from its number, so a failure is found again.
"""

import random
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from data import raw_text
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
from megatron.data.tokenizers.interface import TokenizerConfig

COUNT = 200
RAW = raw_text.numbers(120)
Reader = Callable[[Path], None]
"""Reads what stands in a folder."""

WAYS_OUT = re.compile(r"give |copy |prepare |name one")


def cut(content: bytes, other: bytes, dice: random.Random) -> bytes:
    return content[: dice.randrange(len(content))]


def flip(content: bytes, other: bytes, dice: random.Random) -> bytes:
    made = bytearray(content)
    for _ in range(dice.choice((1, 1, 3, 20))):
        made[dice.randrange(len(made))] ^= 1 << dice.randrange(8)
    return bytes(made)


def swap(content: bytes, other: bytes, dice: random.Random) -> bytes:
    middle = dice.randrange(len(content))
    return content[middle:] + content[:middle]


def repeat(content: bytes, other: bytes, dice: random.Random) -> bytes:
    begin = dice.randrange(len(content))
    return content + content[begin : begin + dice.randrange(1, 50)]


def zero(content: bytes, other: bytes, dice: random.Random) -> bytes:
    begin = dice.randrange(len(content))
    return content[:begin] + b"\0" * len(content[begin : begin + 40]) + content[begin + 40 :]


def exchange(content: bytes, other: bytes, dice: random.Random) -> bytes:
    return other


def empty(content: bytes, other: bytes, dice: random.Random) -> bytes:
    return b""


DAMAGES = (cut, cut, flip, flip, flip, swap, repeat, zero, exchange, empty, None)
"""``None``: the file is missing."""


def _pair(folder: Path) -> None:
    tokens, index = raw_text.expected(RAW)
    (folder / "x.bin").write_bytes(tokens)
    (folder / "x.idx").write_bytes(index)


def _read_pair(folder: Path) -> None:
    dataset = IndexedDataset(folder / "x")
    assert sum(len(dataset[n]) for n in range(len(dataset))) == dataset.lengths.sum()


def _merge_pair(folder: Path) -> None:
    merge([folder / "x", folder / "x"], folder / "y")
    once, twice = IndexedDataset(folder / "x"), IndexedDataset(folder / "y")
    assert twice.lengths.sum() == 2 * once.lengths.sum()


def _encoder(config: Callable[[Path], TokenizerConfig]) -> Reader:
    def read(folder: Path) -> None:
        tokenizer = build_tokenizer(config(folder))
        for ids in tokenizer.tokenize_all(TEXTS):
            assert all(0 <= index < tokenizer.vocab_size for index in ids)

    return read


def _read_text(folder: Path) -> None:
    config = PreprocessConfig((folder / "in",), folder / "out", raw_text.settings(), restarts=True)
    done: list[Status] = []
    status = preprocess(config, done.append)
    dataset = IndexedDataset(folder / "out_text_document")
    assert len(dataset.document_indices) - 1 == status.documents
    assert len(status.told) == min(status.bad, 10)


def _raw(form: str) -> Callable[[Path], None]:
    return lambda folder: raw_text.FORMS[form](folder / "in", RAW)


def _model(name: str) -> Callable[[Path], TokenizerConfig]:
    return lambda folder: TokenizerConfig(name, folder / "x.model")


def _gpt2(folder: Path) -> TokenizerConfig:
    return TokenizerConfig(
        "GPT2BPETokenizer", vocab_file=folder / "vocab.json", merge_file=folder / "merges.txt"
    )


KINDS: dict[str, tuple[Callable[[Path], object], Reader]] = {
    "pair": (_pair, _read_pair),
    "merge": (_pair, _merge_pair),
    "sentencepiece": (
        lambda folder: sentencepiece_model(folder / "x.model"),
        _encoder(_model("GPTSentencePieceTokenizer")),
    ),
    "bert": (
        lambda folder: sentencepiece_model(folder / "x.model"),
        _encoder(_model("SentencePieceTokenizer")),
    ),
    "tiktoken": (
        lambda folder: tiktoken_file(folder / "x.model"),
        _encoder(_model("TikTokenizer")),
    ),
    "gpt2": (gpt2_files, _encoder(_gpt2)),
    "hugging-face": (
        hugging_face_folder,
        _encoder(lambda folder: TokenizerConfig("HuggingFaceTokenizer", folder)),
    ),
    **{form: (_raw(form), _read_text) for form in raw_text.FORMS},
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of sound files for every kind."""
    root = tmp_path_factory.mktemp("sound")
    for name, (write, _) in KINDS.items():
        (root / name).mkdir()
        write(root / name)
    return root


@contextmanager
def told_in_a_line(folder: Path) -> Iterator[None]:
    """Nothing, or one error of a user's kind in a line."""
    try:
        yield
    except (ValueError, FileNotFoundError) as error:
        message = str(error)
        assert "\n" not in message.strip(), message
        assert str(folder) in message, message
        assert WAYS_OUT.search(message), message


@pytest.mark.parametrize("kind", KINDS)
def test_sound_files_are_read(sound: Path, kind: str, tmp_path: Path) -> None:
    shutil.copytree(sound / kind, tmp_path, dirs_exist_ok=True)
    KINDS[kind][1](tmp_path)


@pytest.mark.parametrize("part", range(10))
def test_damage_is_read_or_told(sound: Path, tmp_path: Path, part: int) -> None:
    for number in range(part * COUNT // 10, (part + 1) * COUNT // 10):
        dice = random.Random(number)
        kind = list(KINDS)[number % len(KINDS)]
        folder = tmp_path / f"{number}-{kind}"
        shutil.copytree(sound / kind, folder)
        victim = dice.choice(sorted(folder.iterdir()))
        others = sorted(path for path in sound.rglob("*") if path.is_file())
        damage = dice.choice(DAMAGES)
        if damage is None:
            victim.unlink()
        else:
            content = damage(victim.read_bytes(), dice.choice(others).read_bytes(), dice)
            victim.write_bytes(content)
        with told_in_a_line(folder):
            KINDS[kind][1](folder)
