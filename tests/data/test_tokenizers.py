"""Tokenizers: ids are the libraries' own and Megatron-LM's, and what does not fit is told."""

import base64
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import tiktoken
from harness.properties import examples
from harness.small_vocabularies import (
    TEXT,
    TEXTS,
    byte_of_character,
    gpt2_files,
    hugging_face_folder,
    sentencepiece_model,
    tiktoken_file,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.tokenizers import files
from megatron.data.tokenizers.build import build_tokenizer
from megatron.data.tokenizers.byte_pairs import PATTERNS
from megatron.data.tokenizers.interface import Tokenizer
from megatron.data.tokenizers.settings import TIKTOKEN_PATTERNS, TYPES, TokenizerSettings

ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
GPT2_WORDS = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
"""GPT-2's expression, as tiktoken writes it."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sentencepiece_model(tmp_path_factory.mktemp("model") / "tokenizer.model")


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TokenizerSettings]:
    """One of every type; each encodes any text."""
    folder = tmp_path_factory.mktemp("configs")
    lossless = sentencepiece_model(
        folder / "any.model",
        vocab_size=400,
        byte_fallback=True,
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
    )
    pieces = ("GPTSentencePieceTokenizer", "SentencePieceTokenizer", "Llama2Tokenizer")
    tik = tiktoken_file(folder / "tik.json")
    return {
        **{name: TokenizerSettings(name, lossless) for name in pieces},
        "TikTokenizer": TokenizerSettings("TikTokenizer", tik),
        "GPT2BPETokenizer": gpt2_files(folder),
        "HuggingFaceTokenizer": TokenizerSettings(
            "HuggingFaceTokenizer", hugging_face_folder(folder)
        ),
        "NullTokenizer": TokenizerSettings("NullTokenizer", vocab_size=1000),
    }


@pytest.fixture(scope="module")
def built(configs: dict[str, TokenizerSettings]) -> dict[str, Tokenizer]:
    return {name: build_tokenizer(config) for name, config in configs.items()}


def of(tokenizer_type: str, model: Path | None, vocab_size: int | None = None) -> Tokenizer:
    return build_tokenizer(TokenizerSettings(tokenizer_type, model, vocab_size=vocab_size))


def test_every_pattern_that_a_flag_names_is_known() -> None:
    assert PATTERNS.keys() == set(TIKTOKEN_PATTERNS)


@pytest.mark.parametrize("name", [name for name in TYPES if name != "NullTokenizer"])
def test_any_text_survives(built: dict[str, Tokenizer], name: str) -> None:
    tokenizer = built[name]

    @given(st.lists(ANY_TEXT.filter(lambda text: "\u2581" not in text), max_size=4))
    @settings(deadline=None, max_examples=examples(50))
    def survives(texts: list[str]) -> None:
        found = tokenizer.tokenize_all(texts)
        assert found == [tokenizer.tokenize(text) for text in texts]
        assert [tokenizer.detokenize(ids) for ids in found] == texts
        assert all(0 <= index < tokenizer.vocab_size for ids in found for index in ids)

    survives()
    assert 0 <= tokenizer.eod < tokenizer.vocab_size


@given(st.lists(st.integers(0, 1000)))
def test_numbers_survive(ids: list[int]) -> None:
    tokenizer = of("NullTokenizer", None, 1000)
    assert tokenizer.tokenize_all([tokenizer.detokenize(ids)]) == [ids]


@pytest.mark.parametrize("name", [name for name in TYPES if "HuggingFace" not in name])
def test_no_text_makes_an_end_of_a_document(built: dict[str, Tokenizer], name: str) -> None:
    tokenizer = built[name]
    text = "5 6" if name == "NullTokenizer" else "fox </s> <EOD> <|endoftext|> dog"
    assert tokenizer.eod not in tokenizer.tokenize(text)


def test_gpt2_gives_the_ids_that_tiktoken_gives(
    configs: dict[str, TokenizerSettings], built: dict[str, Tokenizer]
) -> None:
    """Another library, with the same vocabulary in its own form."""
    config, tokenizer = configs["GPT2BPETokenizer"], built["GPT2BPETokenizer"]
    assert config.vocab_file is not None
    vocabulary = json.loads(config.vocab_file.read_text())
    end = vocabulary.pop("<|endoftext|>")
    of_character = byte_of_character()
    in_order = sorted(vocabulary.items(), key=lambda entry: entry[1])
    ranks = {bytes(of_character[c] for c in token): index for token, index in in_order}
    other = tiktoken.Encoding("x", pat_str=GPT2_WORDS, mergeable_ranks=ranks, special_tokens={})
    assert tokenizer.eod == end
    assert tokenizer.vocab_size == len(vocabulary) + 1

    @given(ANY_TEXT | st.sampled_from(TEXTS))
    @settings(deadline=None)
    def equal(text: str) -> None:
        assert tokenizer.tokenize(text) == other.encode_ordinary(text)

    equal()


def test_hugging_face_gives_the_ids_that_transformers_gives(
    configs: dict[str, TokenizerSettings], built: dict[str, Tokenizer]
) -> None:
    """Text with special tokens in it, too; and those at the beginning where they are asked for."""
    from transformers import PreTrainedTokenizerFast

    config, tokenizer = configs["HuggingFaceTokenizer"], built["HuggingFaceTokenizer"]
    theirs = PreTrainedTokenizerFast.from_pretrained(str(config.tokenizer_model))
    begun = build_tokenizer(replace(config, tokenizer_hf_include_special_tokens=True))
    for text in [*TEXTS, "a</s>b"]:
        plain = theirs(text, add_special_tokens=False).input_ids
        assert tokenizer.tokenize(text) == plain
        assert begun.tokenize(text) == begun.tokenize_all([text])[0] == theirs(text).input_ids
    assert (tokenizer.vocab_size, tokenizer.eod) == (len(theirs), theirs.eos_token_id)
    assert begun.tokenize(TEXT)[0] == theirs.convert_tokens_to_ids("<s>")


@pytest.mark.parametrize("pattern", ["v1", "v2"])
def test_tiktoken_gives_its_own_ids_after_the_special_ones(
    configs: dict[str, TokenizerSettings], pattern: str
) -> None:
    config = replace(
        configs["TikTokenizer"], tiktoken_pattern=pattern, tiktoken_num_special_tokens=10
    )
    assert config.tokenizer_model is not None
    tokenizer = build_tokenizer(config)
    entries = json.loads(config.tokenizer_model.read_text())
    ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in entries}
    own = tiktoken.Encoding(
        "x", pat_str=PATTERNS[pattern], mergeable_ranks=ranks, special_tokens={}
    )
    for text in TEXTS:
        assert tokenizer.tokenize(text) == [10 + index for index in own.encode_ordinary(text)]
    assert (tokenizer.vocab_size, tokenizer.eod) == (len(entries) + 10, 2)
    named = replace(config, tokenizer_special_tokens=("</s>", "<unk>", "<s>", "<mine>"))
    assert build_tokenizer(named).eod == 0


def test_of_a_tiktoken_file_only_a_vocabulary_is_read(
    configs: dict[str, TokenizerSettings],
) -> None:
    config = replace(configs["TikTokenizer"], vocab_size=1260)
    assert build_tokenizer(config).vocab_size == 1260


def test_llama_2_begins_every_text(built: dict[str, Tokenizer]) -> None:
    llama, plain = built["Llama2Tokenizer"], built["GPTSentencePieceTokenizer"]
    assert llama.tokenize(TEXT) == [1, *plain.tokenize(TEXT)]
    assert llama.tokenize_all([TEXT, ""]) == [[1, *plain.tokenize(TEXT)], [1]]
    assert (llama.vocab_size, llama.eod) == (plain.vocab_size, plain.eod)


def test_extra_ids_come_last(model: Path) -> None:
    config = TokenizerSettings("SentencePieceTokenizer", model, vocab_extra_ids=3)
    tokenizer = build_tokenizer(config)
    assert (tokenizer.vocab_size, tokenizer.eod) == (65 + 3, 62)


def test_a_missing_library_is_told_with_the_line_that_installs_it(
    configs: dict[str, TokenizerSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(files, "import_module", absent)
    for name, package in [
        ("TikTokenizer", "tiktoken"),
        ("GPT2BPETokenizer", "tokenizers"),
        ("HuggingFaceTokenizer", "tokenizers"),
    ]:
        message = rf"^--tokenizer-type {name} needs the Python package {package}: pip install "
        with pytest.raises(ValueError, match=message):
            build_tokenizer(configs[name])


Damage = Callable[[dict[str, TokenizerSettings], Path], TokenizerSettings]


def _merges_of_others(configs: dict[str, TokenizerSettings], folder: Path) -> TokenizerSettings:
    (folder / "merges.txt").write_text("#version: 0.2\nx yz\n")
    return replace(configs["GPT2BPETokenizer"], merge_file=folder / "merges.txt")


def _without_end(configs: dict[str, TokenizerSettings], folder: Path) -> TokenizerSettings:
    given = configs["HuggingFaceTokenizer"].tokenizer_model
    assert given is not None
    (folder / "tokenizer.json").write_bytes((given / "tokenizer.json").read_bytes())
    return TokenizerSettings("HuggingFaceTokenizer", folder)


def _vocabulary(content: str) -> Damage:
    def damage(configs: dict[str, TokenizerSettings], folder: Path) -> TokenizerSettings:
        (folder / "vocab.json").write_text(content)
        return replace(configs["GPT2BPETokenizer"], vocab_file=folder / "vocab.json")

    return damage


def _ranks(content: str) -> Damage:
    def damage(configs: dict[str, TokenizerSettings], folder: Path) -> TokenizerSettings:
        (folder / "tik.json").write_text(content)
        return TokenizerSettings("TikTokenizer", folder / "tik.json")

    return damage


def _changed(name: str, **changes: object) -> Damage:
    return lambda configs, folder: replace(configs[name], **changes)  # type: ignore[arg-type] # any field


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(_merges_of_others, r"--merge-file .*merges\.txt cannot be read", id="merges"),
        pytest.param(_without_end, r"it names no eos_token.*tokenizer_config", id="no-end"),
        pytest.param(_vocabulary("[1, 2]"), r"vocab\.json does not give tokens ids", id="list"),
        pytest.param(_vocabulary('{"a": 0}'), "lacks 256 of the 256 bytes", id="no-bytes"),
        pytest.param(_vocabulary('{"a": 7}'), "its 1 ids are not 0 to 0", id="gaps"),
        pytest.param(_vocabulary("{"), "cannot be read as JSON", id="cut"),
        pytest.param(_ranks("{}"), "holds no list of 256", id="no-list"),
        pytest.param(_ranks(json.dumps([{}] * 256)), "its entry 0 is not", id="entries"),
        pytest.param(_changed("TikTokenizer", vocab_size=1001), "no room for 256", id="room"),
        pytest.param(
            _changed("TikTokenizer", tiktoken_num_special_tokens=2), "</s> is missing", id="few"
        ),
        pytest.param(
            _changed("TikTokenizer", tokenizer_special_tokens=("<s>", "</s>")),
            "<unk> is missing",
            id="unnamed",
        ),
        pytest.param(
            _changed("GPT2BPETokenizer", merge_file=None), "--merge-file is missing", id="one-file"
        ),
        pytest.param(
            _changed("HuggingFaceTokenizer", tokenizer_model=Path("org/name")),
            r"--tokenizer-model org/name: .*nothing is downloaded",
            id="hub-name",
        ),
        pytest.param(
            _changed("GPT2BPETokenizer", vocab_size=99),
            r"--vocab-size 99 is smaller than the \d+ entries of --vocab-file",
            id="size",
        ),
    ],
)
def test_what_cannot_be_a_tokenizer_is_told_with_flag_and_way_out(
    configs: dict[str, TokenizerSettings], tmp_path: Path, damage: Damage, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build_tokenizer(damage(configs, tmp_path))


def test_gpt_sentencepiece_is_the_model_as_it_is(model: Path) -> None:
    tokenizer = of("GPTSentencePieceTokenizer", model, None)
    ids = tokenizer.tokenize(TEXT)
    assert (tokenizer.vocab_size, tokenizer.eod) == (60, 2)
    assert tokenizer.detokenize(ids) == TEXT
    assert tokenizer.detokenize([*ids, tokenizer.eod]) == TEXT
    assert max(ids) < 60


def test_sentencepiece_appends_cls_sep_eod_mask(model: Path) -> None:
    """The model has <s> and </s> but no padding piece: <CLS> 60, <SEP> 61, <EOD> 62, ..."""
    tokenizer = of("SentencePieceTokenizer", model, None)
    ids = tokenizer.tokenize(TEXT)
    assert (tokenizer.vocab_size, tokenizer.eod) == (65, 62)
    assert tokenizer.detokenize([*ids, tokenizer.eod]) == TEXT


def test_sentencepiece_keeps_special_tokens_the_model_has(tmp_path: Path) -> None:
    model = sentencepiece_model(tmp_path / "x.model", control_symbols=["<EOD>"], pad_id=3)
    tokenizer = of("SentencePieceTokenizer", model, None)
    assert (tokenizer.vocab_size, tokenizer.eod) == (63, 4)


def test_null_tokenizer_reads_numbers() -> None:
    tokenizer = of("NullTokenizer", None, 100)
    assert (tokenizer.vocab_size, tokenizer.eod) == (101, 100)
    assert tokenizer.tokenize("5 99  0\n") == [5, 99, 0]
    assert tokenizer.detokenize([5, 99, 0]) == "5 99 0"


def test_missing_file_names_flag_and_way_out(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--tokenizer-model .*absent is not a file.*sample_data"):
        of("GPTSentencePieceTokenizer", tmp_path / "absent", None)


@pytest.mark.parametrize("damage", ["empty", "truncated", "foreign"])
def test_damaged_file_names_flag_and_way_out(model: Path, tmp_path: Path, damage: str) -> None:
    content = {"empty": b"", "truncated": model.read_bytes()[:-5], "foreign": b"hello\n" * 9}
    (tmp_path / "bad.model").write_bytes(content[damage])
    with pytest.raises(ValueError, match=r"--tokenizer-model .*bad\.model cannot be read"):
        of("SentencePieceTokenizer", tmp_path / "bad.model", None)


def test_model_without_end_of_sentence_is_refused(tmp_path: Path) -> None:
    model = sentencepiece_model(tmp_path / "x.model", eos_id=-1)
    with pytest.raises(ValueError, match="has no </s>"):
        of("GPTSentencePieceTokenizer", model, None)


def test_vocab_size_may_exceed_the_tokenizer_but_not_fall_short(model: Path) -> None:
    assert of("GPTSentencePieceTokenizer", model, 64).vocab_size == 60
    with pytest.raises(ValueError, match="--vocab-size 59 is smaller than the 60 entries"):
        of("GPTSentencePieceTokenizer", model, 59)


@pytest.mark.parametrize(
    ("tokenizer_type", "vocab_size", "message"),
    [
        ("NullTokenizer", None, "--vocab-size None"),
        ("NullTokenizer", 0, "--vocab-size 0"),
        ("BertWordPieceCase", 100, "--tokenizer-type BertWordPieceCase is not available; choose"),
        ("SentencePieceTokenizer", None, "--tokenizer-model is missing"),
    ],
)
def test_flags_that_do_not_fit_are_refused(
    tokenizer_type: str, vocab_size: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        of(tokenizer_type, None, vocab_size)
