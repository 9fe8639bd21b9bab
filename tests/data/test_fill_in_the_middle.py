"""Middles are moved to the ends of their documents: nothing is lost, and the same for everyone."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness.properties import examples
from harness.small_vocabularies import TEXTS, byte_pair_encoding
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatron.data.datasets import build_datasets
from megatron.data.fill_in_the_middle import FilledDataset, FillTokens, rearranged
from megatron.data.indexed import IndexedWriter
from megatron.data.settings import FillSettings
from megatron.data.tokenizers.build import build_tokenizer
from megatron.data.tokenizers.settings import TokenizerSettings
from megatron.run.command_line import parse

NAMES = ("prefix", "middle", "suffix", "pad")
FLAGS = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 40 --micro-batch-size 1 "
    "--lr 1e-3 --train-iters 9 --device cpu --tokenizer-type HuggingFaceTokenizer"
)
DOCUMENT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with the tokens that name the parts, as StarCoder's has them."""
    made = tmp_path_factory.mktemp("tokenizer")
    names = [f"<fim_{name}>" for name in NAMES]
    byte_pair_encoding(["<|endoftext|>", "<file_sep>", *names]).save(str(made / "tokenizer.json"))
    (made / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    return made


@pytest.fixture(scope="module")
def corpus(tokens: FillTokens, tmp_path_factory: pytest.TempPathFactory) -> Path:
    prefix = tmp_path_factory.mktemp("corpus") / "texts"
    tokenizer = tokens.tokenizer
    with IndexedWriter(prefix, tokenizer.vocab_size) as writer:
        for number in range(120):
            text = TEXTS[number % 3][number % 7 :]
            writer.add_document([*tokenizer.tokenize(text), tokenizer.eod])
    return prefix


def run_config(folder: Path, flags: str, data: str = "--data-path x --bf16 --dry-run") -> Any:
    words = f"{FLAGS} --tokenizer-model {folder} {data} {flags}".split()
    return parse(words, world_size=1)


@pytest.fixture(scope="module")
def fills(folder: Path) -> FillSettings:
    """What the flags make when nothing but ``--fim-data`` is given."""
    found = run_config(folder, "--fim-data").data.fill
    assert isinstance(found, FillSettings)
    return found


@pytest.fixture(scope="module")
def tokens(folder: Path, fills: FillSettings) -> FillTokens:
    tokenizer = TokenizerSettings("HuggingFaceTokenizer", folder)
    return FillTokens.of(fills, build_tokenizer(tokenizer))


def random(seed: int = 0) -> np.random.RandomState:
    return np.random.RandomState(seed)


def text_of(found: list[int], tokens: FillTokens) -> str:
    """The document that moved parts make; in SPM nothing stands before the suffix."""
    assert found[0] == tokens.prefix
    suffix, middle = found.index(tokens.suffix), found.index(tokens.middle)
    assert 0 < suffix < middle
    parts = found[1:suffix], found[middle + 1 :], found[suffix + 1 : middle]
    return "".join(tokens.tokenizer.detokenize(ids) for ids in parts)


@given(document=DOCUMENT, seed=st.integers(0, 1 << 31), spm=st.booleans())
@settings(deadline=None, max_examples=examples(200))
def test_the_parts_make_the_document(
    fills: FillSettings, tokens: FillTokens, document: str, seed: int, spm: bool
) -> None:
    config = replace(fills, fim_rate=1.0, fim_spm_rate=float(spm))
    ids = tokens.tokenizer.tokenize(document)
    found = rearranged(ids, config, tokens, random(seed))
    if not ids:
        assert found == []
        return
    assert text_of(found, tokens) == document
    if spm:
        assert found[1] == tokens.suffix


def test_every_place_is_cut(fills: FillSettings, tokens: FillTokens) -> None:
    config, ids = replace(fills, fim_rate=1.0), tokens.tokenizer.tokenize("abc")
    found = {tuple(rearranged(ids, config, tokens, random(seed))) for seed in range(300)}
    assert len(found) == 10, "four places for two cuts; SPM is PSM with an empty prefix"


def test_rates_are_those_of_documents(fills: FillSettings, tokens: FillTokens) -> None:
    document = [*tokens.tokenizer.tokenize("fox"), tokens.end]
    config = replace(fills, fim_rate=0.3, fim_spm_rate=0.9)
    found = rearranged(document * 4000, config, tokens, random())
    assert found.count(tokens.end) == 4000
    moved = found.count(tokens.prefix)
    assert moved / 4000 == pytest.approx(0.3, abs=0.03)
    places = [n for n, token in enumerate(found) if token == tokens.prefix]
    at_once = sum(found[n + 1] == tokens.suffix for n in places)
    assert at_once / moved == pytest.approx(0.9 + 0.1 * 4 / 10, abs=0.03), "an empty prefix too"
    whole = replace(fills, fim_rate=0.0)
    assert rearranged(document * 9, whole, tokens, random()) == document * 9


def test_fragments_are_moved_one_by_one(fills: FillSettings, tokens: FillTokens) -> None:
    tokenizer = tokens.tokenizer
    (mark,) = tokenizer.tokenize("<file_sep>")
    files = [tokenizer.tokenize(text) for text in ("fox", "dog", "keep it", "lazy")]
    document = [*files[0], mark, *files[1], mark, mark, *files[2], mark, *files[3]]
    config = replace(
        fills,
        fim_rate=1.0,
        fim_fragment_rate=1.0,
        fim_split_sample="<file_sep>",
        fim_no_prefix="keep",
    )
    tokens = FillTokens.of(config, tokenizer)
    found = rearranged([*document, tokens.end], config, tokens, random())
    assert found.pop() == tokens.end
    pieces: list[list[int]] = [[]]
    for token in found:
        if token == mark:
            pieces.append([])
        else:
            pieces[-1].append(token)
    assert [text_of(pieces[n], tokens) for n in (0, 1, 4)] == ["fox", "dog", "lazy"]
    assert pieces[2:4] == [[], files[2]]
    seldom = replace(config, fim_fragment_rate=0.0)
    assert rearranged(document, seldom, tokens, random()) == document


def read(dataset: Any, numbers: range) -> list[list[int]]:
    rows: list[list[int]] = []
    for number in numbers:
        out: NDArray[np.int64] = np.empty(dataset.seq_length + 1, np.int64)
        dataset.read(number, out)
        rows.append(out.tolist())
    return rows


def test_samples_are_the_same_whoever_reads_them(
    folder: Path, corpus: Path, tokens: FillTokens
) -> None:
    """In any order; and they are those of the corpus but for what was moved."""
    data = run_config(
        folder, "--fim-data --fim-rate 0.1 --split 6,4,0", f"--data-path {corpus}"
    ).data
    vocabulary = build_tokenizer(data.tokenizer).vocab_size
    made = build_datasets(data, (40, 40, 0), vocabulary)
    plain = build_datasets(replace(data, fill=FillSettings()), (40, 40, 0), vocabulary)
    assert isinstance(made.train, FilledDataset)
    rows = read(made.train, range(40))
    assert rows[20:] + rows[:20] == read(made.train, range(20, 40)) + read(made.train, range(20))
    before = read(plain.train, range(40))
    changed = sum(one != other for one, other in zip(rows, before, strict=True))
    assert 5 < changed < 35
    assert plain.train is not None
    other_seed = build_datasets(replace(data, seed=data.seed + 1), (40, 0, 0), vocabulary)
    assert read(other_seed.train, range(40)) != rows
    other_split = FilledDataset(plain.train, data.fill, tokens, seed=data.seed, split=1)
    assert read(other_split, range(40)) != rows


class OneSample:
    """A dataset of one sample."""

    masked_token: int | None = None

    def __init__(self, tokens: list[int]) -> None:
        self._tokens, self.seq_length = tokens, len(tokens) - 1

    def __len__(self) -> int:
        return 1

    def read(self, index: int, out: NDArray[np.int64]) -> None:
        out[:] = self._tokens


def test_a_sample_keeps_its_length(fills: FillSettings, tokens: FillTokens) -> None:
    tokenizer = tokens.tokenizer
    config = replace(fills, fim_rate=1.0)
    long = OneSample(tokenizer.tokenize("the quick brown fox"))
    (found,) = read(FilledDataset(long, config, tokens, seed=1, split=0), range(1))
    assert found[0] == tokens.prefix
    single = [ids for byte in "the quick brown fox " * 3 for ids in tokenizer.tokenize(byte)]
    (found,) = read(FilledDataset(OneSample(single), config, tokens, seed=1, split=0), range(1))
    assert len(found) == len(single)
    pads = found.count(tokens.pad)
    assert found[-pads:] == [tokens.pad] * pads != [], "whole words take fewer tokens"


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--fim-data --fim-prefix-token <PRE>", "--fim-prefix-token <PRE>: the tokenizer has no"),
        ("--fim-data --fim-split-sample fox-dog", "--fim-split-sample fox-dog: .*name one that"),
        ("--fim-data --fim-rate 1.5", "--fim-rate 1.5: must be at least 0 and at most 1"),
        ("--fim-data --tokenizer-type NullTokenizer", "--fim-data .*add --tokenizer-type Hugging"),
    ],
)
def test_what_cannot_be_is_told(folder: Path, flags: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        run_config(folder, flags)


def test_made_up_data_has_no_text(folder: Path) -> None:
    with pytest.raises(ValueError, match="--fim-data does not go with --mock-data"):
        run_config(folder, "--fim-data", "--mock-data")


def test_flags_become_a_configuration(folder: Path) -> None:
    assert not run_config(folder, "").data.fill.fim_data
    notes = run_config(folder, "--fim-rate 0.1").notes
    assert "--fim-rate 0.1 changes nothing without --fim-data" in notes
    found = run_config(
        folder,
        "--fim-data --fim-rate 0.9 --fim-spm-rate 0.1 --fim-split-sample <file_sep> "
        "--fim-no-prefix # --fim-pad-token <|endoftext|>",
    ).data
    fill, tokenizer = found.fill, build_tokenizer(found.tokenizer)
    assert (fill.fim_rate, fill.fim_spm_rate, fill.fragment_rate) == (0.9, 0.1, 0.9)
    tokens = FillTokens.of(fill, tokenizer)
    ids = tokens.prefix, tokens.middle, tokens.suffix, tokens.split
    words = "<fim_prefix><fim_middle><fim_suffix><file_sep>"
    assert list(ids) == tokenizer.tokenize(words)
    assert tokens.pad == tokens.end == tokenizer.eod
