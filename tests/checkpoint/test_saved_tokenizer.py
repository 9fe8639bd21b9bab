"""A checkpoint remembers its tokenizer: flags, digests, and copies of the files."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
from harness.small_vocabularies import (
    TEXT,
    gpt2_files,
    hugging_face_folder,
    sentencepiece_model,
    tiktoken_file,
)

from megatron.checkpoint import saved_tokenizer, tokenizer_files
from megatron.checkpoint.common import COMMON
from megatron.checkpoint.folder import DamagedError
from megatron.checkpoint.saved_tokenizer import SavedTokenizer, tokenizer_of
from megatron.data.tokenizers.build import build_tokenizer
from megatron.data.tokenizers.settings import TYPES, TokenizerSettings

FILES: Final[dict[str, Callable[[Path], TokenizerSettings]]] = {
    "GPTSentencePieceTokenizer": lambda path: TokenizerSettings(
        "GPTSentencePieceTokenizer", sentencepiece_model(path / "x.model")
    ),
    "SentencePieceTokenizer": lambda path: TokenizerSettings(
        "SentencePieceTokenizer", sentencepiece_model(path / "x.model"), vocab_extra_ids=5
    ),
    "Llama2Tokenizer": lambda path: TokenizerSettings(
        "Llama2Tokenizer", sentencepiece_model(path / "x.model")
    ),
    "TikTokenizer": lambda path: TokenizerSettings(
        "TikTokenizer",
        tiktoken_file(path / "x.json"),
        tokenizer_special_tokens=("<s>", "</s>", "<unk>"),
        tiktoken_num_special_tokens=10,
    ),
    "GPT2BPETokenizer": gpt2_files,
    "HuggingFaceTokenizer": lambda path: TokenizerSettings(
        "HuggingFaceTokenizer",
        hugging_face_folder(path),
        tokenizer_hf_include_special_tokens=True,
    ),
    "NullTokenizer": lambda path: TokenizerSettings("NullTokenizer", vocab_size=99),
}


def made(kind: str, folder: Path) -> TokenizerSettings:
    """The settings of a small tokenizer whose files are in a new folder."""
    folder.mkdir(parents=True)
    return FILES[kind](folder)


def save(root: Path, used: TokenizerSettings) -> Path:
    """Save a checkpoint that has nothing but its tokenizer; return its folder."""
    saved = SavedTokenizer.of(used)
    assert saved is not None
    where = root / "iter_0000010"
    where.mkdir(parents=True)
    (where / COMMON).write_text(json.dumps(saved.stored))
    saved.copy(root, used)
    return where


def copies(root: Path) -> list[Path]:
    return sorted(root.glob("tokenizer_*/*"))


def test_every_type_is_covered_here() -> None:
    assert FILES.keys() == set(TYPES)


@pytest.mark.parametrize("kind", TYPES)
def test_a_moved_checkpoint_has_its_tokenizer(kind: str, tmp_path: Path) -> None:
    """Also after the files of the training are gone."""
    used = made(kind, tmp_path / "own")
    text = "3 17 5" if kind == "NullTokenizer" else TEXT
    wanted = build_tokenizer(used)
    save(tmp_path / "root", used)
    shutil.rmtree(tmp_path / "own")
    (tmp_path / "root").rename(tmp_path / "moved")
    where = tmp_path / "moved" / "iter_0000010"
    found, notes = tokenizer_of(where, TokenizerSettings(), ())
    again = build_tokenizer(found)
    assert again.tokenize(text) == wanted.tokenize(text)
    assert (again.vocab_size, again.eod) == (wanted.vocab_size, wanted.eod)
    assert found == replace(
        used,
        tokenizer_model=found.tokenizer_model,
        vocab_file=found.vocab_file,
        merge_file=found.merge_file,
    )
    (note,) = notes
    assert note.startswith(f"the tokenizer is that of {where}: --tokenizer-type {kind}")
    for path in copies(tmp_path / "moved"):
        assert path.resolve().is_relative_to(tmp_path / "moved")


def test_a_checkpoint_holds_no_path(tmp_path: Path) -> None:
    where = save(tmp_path / "root", made("GPT2BPETokenizer", tmp_path / "own"))
    assert str(tmp_path) not in (where / COMMON).read_text()


def test_runs_without_a_tokenizer_remember_the_size_of_their_vocabulary(tmp_path: Path) -> None:
    assert SavedTokenizer.of(TokenizerSettings()) is None
    where = save(tmp_path, TokenizerSettings(vocab_size=63))
    found, _ = tokenizer_of(where, TokenizerSettings(), ())
    assert found == TokenizerSettings(vocab_size=63)
    (where / COMMON).write_text("{}")
    assert tokenizer_of(where, TokenizerSettings(), ()) == (TokenizerSettings(), [])


def test_equal_files_are_written_once(tmp_path: Path) -> None:
    used = made("HuggingFaceTokenizer", tmp_path / "own")
    save(tmp_path / "root", used)
    before = {path: path.stat().st_ino for path in copies(tmp_path / "root")}
    saved = SavedTokenizer.of(used)
    assert saved is not None
    saved.copy(tmp_path / "root", used)
    saved.copy(tmp_path / "root", saved.placed(tmp_path / "root"))  # as a run that goes on does
    assert {path: path.stat().st_ino for path in copies(tmp_path / "root")} == before
    copies(tmp_path / "root")[0].write_text("{}")  # a damaged copy is written again
    saved.copy(tmp_path / "root", used)
    assert list(saved.problems(tmp_path / "root")) == []


def test_runs_with_other_tokenizers_share_a_folder(tmp_path: Path) -> None:
    one, other = (made(kind, tmp_path / kind) for kind in ("GPT2BPETokenizer", "Llama2Tokenizer"))
    root = tmp_path / "root"
    for used in (one, other):
        saved = SavedTokenizer.of(used)
        assert saved is not None
        saved.copy(root, used)
    assert len(copies(root)) == 3
    assert len({path.parent for path in copies(root)}) == 2


def test_a_file_that_changes_meanwhile_is_not_copied(tmp_path: Path) -> None:
    used = made("Llama2Tokenizer", tmp_path / "own")
    saved = SavedTokenizer.of(used)
    assert saved is not None
    assert used.tokenizer_model is not None
    used.tokenizer_model.write_bytes(b"another one")
    with pytest.raises(OSError, match=r"x\.model has changed since the run began"):
        saved.copy(tmp_path / "root", used)
    assert copies(tmp_path / "root") == []


def test_large_files_are_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (saved_tokenizer, tokenizer_files):
        monkeypatch.setattr(module, "LARGEST", 1000)
    where = save(tmp_path / "root", made("Llama2Tokenizer", tmp_path / "own"))
    assert copies(tmp_path / "root") == []
    with pytest.raises(
        DamagedError, match=r"bytes, and checkpoints keep copies of up to 1,000: gi"
    ):
        tokenizer_of(where, TokenizerSettings(), ())
    used = FILES["Llama2Tokenizer"](tmp_path / "own")
    assert tokenizer_of(where, used, {"tokenizer_type", "tokenizer_model"}) == (used, [])


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)


def linked(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


def linked_folder(path: Path) -> None:
    elsewhere = path.parent.parent.parent / "elsewhere"
    path.parent.rename(elsewhere)
    path.parent.symlink_to(elsewhere)


def piped(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (flipped, "is not what was written: its BLAKE3 digest is [0-9a-f]{64}, and that of the .*"),
        (Path.unlink, "is missing"),
        (linked, "is a link, or its folder is"),
        (linked_folder, "is a link, or its folder is"),
        (piped, r"cannot be read \(it is a pipe, not a file\)"),
    ],
)
def test_a_damaged_copy_is_an_error(
    damage: Callable[[Path], object], told: str, tmp_path: Path
) -> None:
    where = save(tmp_path / "root", made("Llama2Tokenizer", tmp_path / "own"))
    (path,) = copies(tmp_path / "root")
    damage(path)
    with pytest.raises(DamagedError, match=f"tokenizer.model {told}.*give --tokenizer-type"):
        tokenizer_of(where, TokenizerSettings(), ())
    saved = SavedTokenizer.read(where)
    assert saved is not None
    assert len(list(saved.problems(where.parent))) == 1


ENTRY: Final = {"size": 3, "blake3": "0" * 64}


@pytest.mark.parametrize(
    "stored",
    [
        [],
        "GPT2BPETokenizer",
        {"flags": {}},
        {"flags": 3, "files": {}},
        {"flags": {"nonsense": 1}, "files": {}},
        {"flags": {"tokenizer_type": "OtherTokenizer"}, "files": {}},
        {"flags": {"tokenizer_type": ["NullTokenizer"]}, "files": {}},
        {"flags": {"tokenizer_type": "NullTokenizer", "vocab_size": "many"}, "files": {}},
        {"flags": {"tokenizer_type": "NullTokenizer", "vocab_size": -1}, "files": {}},
        {"flags": {"tokenizer_type": "NullTokenizer", "vocab_size": True}, "files": {}},
        {"flags": {"tokenizer_type": "NullTokenizer", "vocab_size": 9}, "files": {"a": ENTRY}},
        {"flags": {"tokenizer_type": "Llama2Tokenizer"}, "files": {}},
        {"flags": {"tokenizer_type": "Llama2Tokenizer"}, "files": {"../x": ENTRY}},
        {"flags": {"tokenizer_type": "Llama2Tokenizer"}, "files": {"tokenizer.model": {}}},
        {
            "flags": {"tokenizer_type": "Llama2Tokenizer"},
            "files": {"tokenizer.model": ENTRY | {"blake3": "../../x"}},
        },
        {
            "flags": {"tokenizer_type": "Llama2Tokenizer"},
            "files": {"tokenizer.model": ENTRY | {"size": -3}},
        },
        {
            "flags": {"tokenizer_type": "Llama2Tokenizer", "tokenizer_model": "/etc/passwd"},
            "files": {"tokenizer.model": ENTRY},
        },
        {
            "flags": {"tokenizer_type": "NullTokenizer", "tokenizer_special_tokens": ["--save"]},
            "files": {},
        },
    ],
)
def test_values_that_no_run_saves_are_refused(stored: Any, tmp_path: Path) -> None:
    where = tmp_path / "iter_0000010"
    where.mkdir()
    (where / COMMON).write_text(json.dumps({"tokenizer": stored}))
    with pytest.raises(DamagedError, match=r"common\.json: tokenizer: .*give --tokenizer-type"):
        tokenizer_of(where, TokenizerSettings(), ())
    own = TokenizerSettings("NullTokenizer", vocab_size=9)
    found, (note,) = tokenizer_of(where, own, {"tokenizer_type", "vocab_size"})  # the way out
    assert found == own
    assert note.startswith("the given tokenizer counts")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"vocab_size": 70}, "--vocab-size 70 counts; the checkpoint's tokenizer has none"),
        ({"vocab_extra_ids": 9}, "--vocab-extra-ids 9 counts; the checkpoint's tokenizer has 5"),
        (
            {"tokenizer_type": "Llama2Tokenizer"},
            "--tokenizer-type Llama2Tokenizer counts; the checkpoint's tokenizer has "
            "SentencePieceTokenizer",
        ),
    ],
)
def test_given_flags_count_and_differences_are_told(
    change: dict[str, Any], told: str, tmp_path: Path
) -> None:
    used = made("SentencePieceTokenizer", tmp_path / "own")
    where = save(tmp_path / "root", used)
    given = {"tokenizer_type", "tokenizer_model", "vocab_extra_ids", *change}
    own = replace(used, **change)
    assert tokenizer_of(where, own, given) == (own, [told])
    assert tokenizer_of(where, used, given) == (used, [])


def test_another_file_counts_and_both_digests_are_told(tmp_path: Path) -> None:
    where = save(tmp_path / "root", made("SentencePieceTokenizer", tmp_path / "own"))
    other = sentencepiece_model(tmp_path / "y.model", vocab_size=50)
    own = TokenizerSettings(tokenizer_model=other)
    found, (note, added) = tokenizer_of(where, own, {"tokenizer_model"})
    assert found == TokenizerSettings("SentencePieceTokenizer", other)
    saved = SavedTokenizer.read(where)
    assert saved is not None
    assert saved.files["tokenizer.model"].blake3 in note
    assert note.startswith(f"{other} counts, with the BLAKE3 digest ")
    assert added == (
        f"the tokenizer's other flags are those of {where}: --tokenizer-type SentencePieceTokenizer"
    )
