"""Every type of tokenizer decides the vocabulary of a run, and what does not fit is told."""

from collections.abc import Callable
from pathlib import Path

import pytest
from harness.small_vocabularies import (
    gpt2_files,
    hugging_face_folder,
    sentencepiece_model,
    tiktoken_file,
)

from megatron.data.tokenizers.settings import TYPES
from megatron.run.command_line import parse, read

RUN = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 "
    "--lr 1e-3 --train-iters 1 --device cpu --mock-data"
)


def with_pieces(folder: Path) -> str:
    return f"--tokenizer-model {sentencepiece_model(folder / 'x.model')}"


def with_gpt2(folder: Path) -> str:
    config = gpt2_files(folder)
    return f"--vocab-file {config.vocab_file} --merge-file {config.merge_file}"


FILES: dict[str, Callable[[Path], str]] = {
    "GPTSentencePieceTokenizer": with_pieces,
    "SentencePieceTokenizer": with_pieces,
    "Llama2Tokenizer": with_pieces,
    "TikTokenizer": lambda folder: f"--tokenizer-model {tiktoken_file(folder / 'x.json')}",
    "GPT2BPETokenizer": with_gpt2,
    "HuggingFaceTokenizer": lambda folder: f"--tokenizer-model {hugging_face_folder(folder)}",
    "NullTokenizer": lambda folder: "--vocab-size 99",
}


def vocabulary(name: str, folder: Path, more: str = "") -> tuple[int, int, int]:
    """Entries, the token that ends a document, and entries with padding."""
    config = parse(f"{RUN} --tokenizer-type {name} {FILES[name](folder)} {more}".split(), 1)
    return config.model.vocab_size, config.data.eod_token, config.parallel.padded_vocab_size


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("GPTSentencePieceTokenizer", (60, 2, 128)),
        ("SentencePieceTokenizer", (65, 62, 128)),
        ("Llama2Tokenizer", (60, 2, 128)),
        ("NullTokenizer", (100, 99, 128)),
    ],
)
def test_the_tokenizer_decides_the_vocabulary(
    tmp_path: Path, name: str, wanted: tuple[int, int, int]
) -> None:
    assert vocabulary(name, tmp_path) == wanted


def test_every_type_is_covered_here() -> None:
    assert FILES.keys() == set(TYPES)


def test_flags_of_a_type_reach_it(tmp_path: Path) -> None:
    small, _, _ = vocabulary("TikTokenizer", tmp_path, "--tiktoken-num-special-tokens 10")
    large, end, padded = vocabulary("TikTokenizer", tmp_path)
    assert (large - small, end) == (990, 2)
    assert padded == -(-large // 128) * 128
    named = "--tokenizer-special-tokens <s> </s> <unk>"
    assert vocabulary("TikTokenizer", tmp_path, named)[1] == 1
    assert vocabulary("SentencePieceTokenizer", tmp_path, "--vocab-extra-ids 5")[0] == 70
    entries, end, _ = vocabulary("GPT2BPETokenizer", tmp_path)
    assert 0 <= end < entries
    assert vocabulary("GPT2BPETokenizer", tmp_path, f"--vocab-size {entries + 9}")[0] == entries + 9
    entries, end, _ = vocabulary("HuggingFaceTokenizer", tmp_path)
    assert 0 <= end < entries


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ("--vocab-file v", "--vocab-file v changes nothing without --tokenizer-type GPT2"),
        ("--vocab-extra-ids 4", "--vocab-extra-ids 4 changes nothing without"),
        ("--tiktoken-pattern v1", "--tiktoken-pattern v1 changes nothing without"),
    ],
)
def test_flags_of_other_types_are_noted(flags: str, word: str) -> None:
    line = f"{RUN} --tokenizer-type NullTokenizer --vocab-size 99 {flags}"
    reading = read(line.split(), 1)
    assert not reading.mistakes
    assert any(note.startswith(word) for note in reading.notes)


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ("--tokenizer-type GPT2BPETokenizer", "--vocab-file is missing"),
        ("--tokenizer-type HuggingFaceTokenizer", "--tokenizer-model is missing"),
        ("--tokenizer-type TikTokenizer --tokenizer-model no", "--tokenizer-model no is not a"),
        ("--tokenizer-type TikTokenizer --tiktoken-pattern v3", "--tiktoken-pattern v3: choose"),
        (
            "--dry-run --vocab-size 9 --tokenizer-type Other",
            "--tokenizer-type Other: choose one of",
        ),
        ("--tokenizer-type NullTokenizer --vocab-size 9 --vocab-extra-ids -1", "--vocab-extra-ids"),
    ],
)
def test_what_does_not_fit_is_told_before_a_run(flags: str, word: str) -> None:
    mistakes = read(f"{RUN} {flags}".split(), 1).mistakes
    assert any(mistake.startswith(word) for mistake in mistakes), mistakes
