"""Tokenizers: Megatron-LM's numbering, and flags that do not fit."""

import io
from pathlib import Path
from typing import Any

import pytest
from sentencepiece import SentencePieceTrainer

from megatron.data.tokenizer import build_tokenizer

TEXT = "the quick brown fox jumps over the lazy dog"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("model") / "tokenizer.model")


def trained(path: Path, **options: Any) -> Path:
    content = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter([TEXT] * 3),
        model_writer=content,
        model_type="bpe",
        vocab_size=60,
        minloglevel=2,
        **options,
    )
    path.write_bytes(content.getvalue())
    return path


def test_gpt_sentencepiece_is_the_model_as_it_is(model: Path) -> None:
    tokenizer = build_tokenizer("GPTSentencePieceTokenizer", model, None)
    ids = tokenizer.tokenize(TEXT)
    assert (tokenizer.vocab_size, tokenizer.eod) == (60, 2)
    assert tokenizer.detokenize(ids) == TEXT
    assert tokenizer.detokenize([*ids, tokenizer.eod]) == TEXT
    assert max(ids) < 60


def test_special_tokens_in_text_are_text(model: Path) -> None:
    tokenizer = build_tokenizer("GPTSentencePieceTokenizer", model, None)
    assert tokenizer.eod not in tokenizer.tokenize("fox </s> dog")


def test_sentencepiece_appends_cls_sep_eod_mask(model: Path) -> None:
    """The model has <s> and </s> but no padding piece: <CLS> 60, <SEP> 61, <EOD> 62, ..."""
    tokenizer = build_tokenizer("SentencePieceTokenizer", model, None)
    ids = tokenizer.tokenize(TEXT)
    assert (tokenizer.vocab_size, tokenizer.eod) == (65, 62)
    assert tokenizer.detokenize([*ids, tokenizer.eod]) == TEXT


def test_sentencepiece_keeps_special_tokens_the_model_has(tmp_path: Path) -> None:
    model = trained(tmp_path / "x.model", control_symbols=["<EOD>"], pad_id=3)
    tokenizer = build_tokenizer("SentencePieceTokenizer", model, None)
    assert (tokenizer.vocab_size, tokenizer.eod) == (63, 4)


def test_null_tokenizer_reads_numbers() -> None:
    tokenizer = build_tokenizer("NullTokenizer", None, 100)
    assert (tokenizer.vocab_size, tokenizer.eod) == (101, 100)
    assert tokenizer.tokenize("5 99  0\n") == [5, 99, 0]
    assert tokenizer.detokenize([5, 99, 0]) == "5 99 0"


def test_missing_file_names_flag_and_way_out(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--tokenizer-model .*absent is not a file.*sample_data"):
        build_tokenizer("GPTSentencePieceTokenizer", tmp_path / "absent", None)


@pytest.mark.parametrize("damage", ["empty", "truncated", "foreign"])
def test_damaged_file_names_flag_and_way_out(model: Path, tmp_path: Path, damage: str) -> None:
    content = {"empty": b"", "truncated": model.read_bytes()[:-5], "foreign": b"hello\n" * 9}
    (tmp_path / "bad.model").write_bytes(content[damage])
    with pytest.raises(ValueError, match=r"--tokenizer-model .*bad\.model cannot be read"):
        build_tokenizer("SentencePieceTokenizer", tmp_path / "bad.model", None)


def test_model_without_end_of_sentence_is_refused(tmp_path: Path) -> None:
    model = trained(tmp_path / "x.model", eos_id=-1)
    with pytest.raises(ValueError, match="has no </s>"):
        build_tokenizer("GPTSentencePieceTokenizer", model, None)


def test_vocab_size_may_exceed_the_tokenizer_but_not_fall_short(model: Path) -> None:
    assert build_tokenizer("GPTSentencePieceTokenizer", model, 64).vocab_size == 60
    with pytest.raises(ValueError, match="--vocab-size 59 is smaller than the 60 entries"):
        build_tokenizer("GPTSentencePieceTokenizer", model, 59)


@pytest.mark.parametrize(
    ("tokenizer_type", "vocab_size", "message"),
    [
        ("NullTokenizer", None, "--vocab-size None"),
        ("NullTokenizer", 0, "--vocab-size 0"),
        ("GPT2BPETokenizer", 100, "--tokenizer-type GPT2BPETokenizer is not available; choose"),
        ("SentencePieceTokenizer", None, "--tokenizer-model is missing"),
    ],
)
def test_flags_that_do_not_fit_are_refused(
    tokenizer_type: str, vocab_size: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build_tokenizer(tokenizer_type, None, vocab_size)
