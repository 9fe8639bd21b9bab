"""A run with --load needs no flag of the tokenizer that its checkpoint remembers."""

from pathlib import Path

import pytest
import torch
from harness.small_vocabularies import sentencepiece_model

from megatron.checkpoint import folder, storage
from megatron.checkpoint.boxed import BoxedTensor
from megatron.checkpoint.common import COMMON
from megatron.checkpoint.saved_tokenizer import SavedTokenizer
from megatron.data.tokenizers.settings import TokenizerSettings
from megatron.parallel.box import whole
from megatron.parallel.groups import ConnectedAxis
from megatron.run.command_line import parse, read

RUN = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 "
    "--lr 1e-3 --train-iters 1 --device cpu --mock-data"
)
TYPE = "GPTSentencePieceTokenizer"


def save(root: Path, iteration: int, used: TokenizerSettings | None) -> None:
    """Save a checkpoint with a tokenizer, or as an older version did, without."""
    saved = None if used is None else SavedTokenizer.of(used)
    if saved is not None and used is not None:
        saved.copy(root, used)
    tensors = {"weight.a": BoxedTensor(torch.ones(2), (2,), whole((2,)))}
    stored = {} if saved is None else saved.stored
    storage.write(root, iteration, tensors, stored, ConnectedAxis("world", 0, (0,)))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Checkpoints of a run with 60 pieces."""
    used = TokenizerSettings(TYPE, sentencepiece_model(tmp_path / "x.model"))
    save(tmp_path / "root", 10, used)
    return tmp_path / "root"


def tokenizer_notes(words: str) -> tuple[TokenizerSettings, list[str]]:
    config = parse(words.split(), 1, speak=False)
    return config.data.tokenizer, [note for note in config.notes if "tokenizer" in note]


@pytest.mark.parametrize("more", ["", "--skip-train"])
def test_the_checkpoint_gives_the_tokenizer(root: Path, more: str) -> None:
    config = parse(f"{RUN} --load {root} {more}".split(), 1, speak=False)
    assert (config.model.vocab_size, config.data.eod_token) == (60, 2)
    model = config.data.tokenizer.tokenizer_model
    assert model is not None
    assert model.parent.parent == root
    notes = [note for note in config.notes if note.startswith("--load: the tokenizer is that of")]
    assert notes == [
        f"--load: the tokenizer is that of {folder.folder_of(root, 10)}: --tokenizer-type {TYPE} "
        f"--tokenizer-model {model}"
    ]


def test_flags_that_are_given_count(root: Path, tmp_path: Path) -> None:
    own, notes = tokenizer_notes(
        f"{RUN} --load {root} --tokenizer-type {TYPE} --tokenizer-model {tmp_path / 'x.model'}"
    )
    assert (own.tokenizer_model, notes) == (tmp_path / "x.model", [])
    other = sentencepiece_model(tmp_path / "y.model", vocab_size=50)
    own, (note, _) = tokenizer_notes(f"{RUN} --load {root} --tokenizer-model {other}")
    assert own == TokenizerSettings(TYPE, other)
    assert note.startswith(f"--load: {other} counts, with the BLAKE3 digest ")
    own, (note,) = tokenizer_notes(
        f"{RUN} --load {root} --tokenizer-type NullTokenizer --vocab-size 59"
    )
    assert own == TokenizerSettings("NullTokenizer", vocab_size=59)
    assert (
        note
        == f"--load: --tokenizer-type NullTokenizer counts; the checkpoint's tokenizer has {TYPE}"
    )


@pytest.mark.parametrize("more", ["", "--dry-run --bf16"])
def test_a_line_that_needs_no_tokenizer_gets_none(root: Path, more: str) -> None:
    assert tokenizer_notes(f"{RUN} --load {root} --vocab-size 60 {more}") == (
        TokenizerSettings(vocab_size=60),
        [],
    )


def test_a_dry_run_reads_the_tokenizer_as_it_reads_the_model(root: Path) -> None:
    dry = f"{RUN} --load {root} --dry-run --bf16"
    (mistake,) = read(dry.split(), 1, speak=False).mistakes
    assert mistake.startswith("--tokenizer-type is missing")


def test_a_size_of_a_vocabulary_is_remembered_too(tmp_path: Path) -> None:
    save(tmp_path, 10, TokenizerSettings(vocab_size=63))
    assert parse(f"{RUN} --load {tmp_path}".split(), 1, speak=False).model.vocab_size == 63


def test_an_older_checkpoint_needs_the_flags(tmp_path: Path) -> None:
    save(tmp_path, 10, None)
    (mistake,) = read(f"{RUN} --load {tmp_path}".split(), 1, speak=False).mistakes
    assert mistake.startswith("--tokenizer-type is missing")
    (mistake,) = read(f"{RUN} --load {tmp_path / 'none'}".split(), 1, speak=False).mistakes
    assert mistake.startswith("--tokenizer-type is missing")


def test_a_damaged_copy_is_one_mistake(root: Path) -> None:
    (path,) = root.glob("tokenizer_*/*")
    path.write_bytes(b"another one")
    (mistake,) = read(f"{RUN} --load {root}".split(), 1, speak=False).mistakes
    assert mistake.startswith(f"--load: {path} is not what was written: its BLAKE3 digest is ")
    assert "give --tokenizer-type and its files" in mistake


def test_of_several_checkpoints_it_is_the_one_that_is_loaded(root: Path) -> None:
    save(root, 20, TokenizerSettings("NullTokenizer", vocab_size=30))
    assert tokenizer_notes(f"{RUN} --load {root}")[0].tokenizer_type == "NullTokenizer"
    assert tokenizer_notes(f"{RUN} --load {root} --ckpt-step 10")[0].tokenizer_type == TYPE
    (folder.folder_of(root, 20) / COMMON).write_text("{}")
    assert tokenizer_notes(f"{RUN} --load {root}")[0].tokenizer_type == TYPE
