"""Hostile tokenizers, and users without a home: one clear error each and no empty file."""

import json
import os
import pwd
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
from harness.small_vocabularies import hugging_face_folder

from megatron.data.index_builder import load_index_builder
from megatron.data.indexed import IndexedDataset
from megatron.data.preparation.encode import EncodeConfig
from megatron.data.preparation.preprocess import PreprocessConfig, preprocess
from megatron.data.tokenizers.build import build_tokenizer
from megatron.data.tokenizers.settings import TokenizerSettings
from megatron.native.files import cache_root

ROOT: Final = Path(__file__).resolve().parents[2]
CATASTROPHE: Final = {
    "type": "Split",
    "pattern": {"Regex": "(x+x+)+y"},
    "behavior": "Isolated",
    "invert": False,
}
"""Cuts text by an expression whose tries double with every x that no y follows."""

LAST_ID: Final = 4294967294
"""The largest id that the package tokenizers reads."""


def folder_with(where: Path, change: Callable[[dict[str, Any]], object]) -> TokenizerSettings:
    """Return a tokenizer whose ``tokenizer.json`` is changed."""
    where.mkdir()
    folder = hugging_face_folder(where)
    content = json.loads((folder / "tokenizer.json").read_text())
    change(content)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return TokenizerSettings("HuggingFaceTokenizer", folder)


def catastrophic(content: dict[str, Any]) -> None:
    content["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [CATASTROPHE, content["pre_tokenizer"]],
    }


def texts(path: Path, *lines: str) -> Path:
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("workers", [1, 2])
def test_a_text_at_which_the_regular_expression_gives_up_is_a_bad_line(
    workers: int, tmp_path: Path
) -> None:
    tokenizer = folder_with(tmp_path / "tokenizer", catastrophic)
    given = texts(tmp_path / "in", "quick", "x" * 40, "lazy")
    config = PreprocessConfig((given,), tmp_path / "out", EncodeConfig(tokenizer), workers)
    status = preprocess(config, lambda _: None)
    assert (status.documents, status.bad) == (2, 1)
    assert "in line 2 cannot be encoded: makes the package tokenizers give up" in status.told[0]
    found = IndexedDataset(tmp_path / "out_text_document")
    alike = build_tokenizer(tokenizer)
    assert [found[i].tolist() for i in range(2)] == [
        alike.tokenize("quick"),
        alike.tokenize("lazy"),
    ]


def test_without_another_line_the_regular_expression_is_told(tmp_path: Path) -> None:
    tokenizer = folder_with(tmp_path / "tokenizer", catastrophic)
    config = PreprocessConfig(
        (texts(tmp_path / "in", "x" * 40),), tmp_path / "out", EncodeConfig(tokenizer)
    )
    with pytest.raises(ValueError, match=r"no document in it \(bad lines: 1, the first: .*give up"):
        preprocess(config, lambda _: None)
    assert not list(tmp_path.glob("out*"))
    with pytest.raises(ValueError, match=r"give up .*retry-limit"):
        build_tokenizer(tokenizer).tokenize("x" * 40)


def test_an_id_beyond_token_files_is_refused(tmp_path: Path) -> None:
    def far(content: dict[str, Any]) -> None:
        content["model"]["vocab"]["far"] = LAST_ID

    tokenizer = folder_with(tmp_path / "tokenizer", far)
    with pytest.raises(
        ValueError,
        match=f"--tokenizer-model .* gives a token the id {LAST_ID}, .* {(1 << 31) - 1}:",
    ):
        build_tokenizer(tokenizer)
    with pytest.raises(ValueError, match="--vocab-size 2147483648 gives a token the id 2147483648"):
        build_tokenizer(TokenizerSettings("NullTokenizer", vocab_size=1 << 31))


@pytest.mark.parametrize("adds_special", [False, True])
@pytest.mark.parametrize("single", [[], [{"SpecialToken": {"id": "<s>", "type_id": 0}}]])
def test_a_post_processor_that_drops_the_text_is_refused(
    single: list[Any], adds_special: bool, tmp_path: Path
) -> None:
    def drop(content: dict[str, Any]) -> None:
        content["post_processor"]["single"] = single

    given = folder_with(tmp_path / "tokenizer", drop)
    tokenizer = TokenizerSettings(
        given.tokenizer_type,
        given.tokenizer_model,
        tokenizer_hf_include_special_tokens=adds_special,
    )
    with pytest.raises(ValueError, match=r"tokenizer\.json: its post_processor names no sequence"):
        build_tokenizer(tokenizer)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("HuggingFaceTokenizer", "tokenizer.json"),
        ("TikTokenizer", "tik.json"),
        ("GPTSentencePieceTokenizer", "tokenizer.model"),
    ],
)
def test_a_file_of_a_terabyte_is_refused(kind: str, name: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    os.truncate(tmp_path / name, 1 << 40)  # takes no room on the disk
    with pytest.raises(ValueError, match=r"has more than 1,073,741,824 bytes"):
        build_tokenizer(TokenizerSettings(kind, tmp_path / name))


def test_input_without_a_token_leaves_no_empty_file(tmp_path: Path) -> None:
    def eat(content: dict[str, Any]) -> None:
        content["normalizer"] = {"type": "Replace", "pattern": {"Regex": "."}, "content": ""}

    tokenizer = folder_with(tmp_path / "tokenizer", eat)
    config = PreprocessConfig(
        (texts(tmp_path / "in", "quick", "lazy"),), tmp_path / "out", EncodeConfig(tokenizer)
    )
    with pytest.raises(ValueError, match="the tokenizer makes no token of its 2 documents"):
        preprocess(config, lambda _: None)
    assert not list(tmp_path.glob("out*"))


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process run under a number that no user has, as a container may."""

    def unknown(number: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME", "MEGATRON_CACHE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("homeless")
def test_a_user_without_a_home_is_told_which_variable_to_set(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    wanted = f"user {os.getuid()} has no home folder .* MEGATRON_CACHE"
    with pytest.raises(OSError, match=wanted):
        cache_root()
    assert load_index_builder().blend_index is not None  # compiled at installation, or in NumPy
    monkeypatch.setenv("MEGATRON_CACHE", "~/cache")
    with pytest.raises(OSError, match=wanted):
        cache_root()
    monkeypatch.setenv("MEGATRON_CACHE", str(tmp_path))
    assert cache_root() == tmp_path


HOMELESS_COMMAND: Final = """
import pwd, runpy, sys
def unknown(number):
    raise KeyError(number)
pwd.getpwuid = unknown
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_sample_data_without_a_home_ends_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("quick fox\n")
    clean = {
        name: value
        for name, value in os.environ.items()
        if name not in ("HOME", "XDG_CACHE_HOME", "MEGATRON_CACHE")
    }
    tool = ROOT / "tools" / "sample_data.py"
    command = [sys.executable, "-c", HOMELESS_COMMAND, str(tool)]
    arguments = ["--vocab-size", "1k", "--text", str(tmp_path / "text")]
    done = subprocess.run([*command, *arguments], env=clean, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "has no home folder" in done.stderr
    assert "Traceback" not in done.stderr
