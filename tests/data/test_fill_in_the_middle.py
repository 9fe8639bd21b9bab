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

from megatron.config.command_line import parse
from megatron.data.config import FillConfig
from megatron.data.datasets import build_datasets
from megatron.data.fill_in_the_middle import FilledDataset, rearranged
from megatron.data.indexed import IndexedWriter
from megatron.data.tokenizers.build import build_tokenizer
from megatron.data.tokenizers.interface import Tokenizer

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
def corpus(fills: FillConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    prefix = tmp_path_factory.mktemp("corpus") / "texts"
    tokenizer = build_tokenizer(fills.tokenizer)
    with IndexedWriter(prefix, tokenizer.vocab_size) as writer:
        for number in range(120):
            text = TEXTS[number % 3][number % 7 :]
            writer.add_document([*tokenizer.tokenize(text), tokenizer.eod])
    return prefix


def run_config(folder: Path, flags: str, data: str = "--data-path x --bf16 --dry-run") -> Any:
    words = f"{FLAGS} --tokenizer-model {folder} {data} {flags}".split()
    return parse(words, world_size=1)


@pytest.fixture(scope="module")
def fills(folder: Path) -> FillConfig:
    """What the flags make when nothing but ``--fim-data`` is given."""
    found = run_config(folder, "--fim-data").data.fill
    assert isinstance(found, FillConfig)
    return found


def random(seed: int = 0) -> np.random.RandomState:
    return np.random.RandomState(seed)


def text_of(found: list[int], config: FillConfig, tokenizer: Tokenizer) -> str:
    """The document that moved parts make; in SPM nothing stands before the suffix."""
    assert found[0] == config.prefix_token
    suffix, middle = found.index(config.suffix_token), found.index(config.middle_token)
    assert 0 < suffix < middle
    parts = found[1:suffix], found[middle + 1 :], found[suffix + 1 : middle]
    return "".join(tokenizer.detokenize(ids) for ids in parts)


@given(document=DOCUMENT, seed=st.integers(0, 1 << 31), spm=st.booleans())
@settings(deadline=None, max_examples=examples(200))
def test_the_parts_make_the_document(
    fills: FillConfig, document: str, seed: int, spm: bool
) -> None:
    config = replace(fills, rate=1.0, spm_rate=float(spm))
    tokenizer = build_tokenizer(config.tokenizer)
    tokens = tokenizer.tokenize(document)
    found = rearranged(tokens, config, tokenizer, random(seed))
    if not tokens:
        assert found == []
        return
    assert text_of(found, config, tokenizer) == document
    if spm:
        assert found[1] == config.suffix_token


def test_every_place_is_cut(fills: FillConfig) -> None:
    config, tokenizer = replace(fills, rate=1.0), build_tokenizer(fills.tokenizer)
    tokens = tokenizer.tokenize("abc")
    found = {tuple(rearranged(tokens, config, tokenizer, random(seed))) for seed in range(300)}
    assert len(found) == 10, "four places for two cuts; SPM is PSM with an empty prefix"


def test_rates_are_those_of_documents(fills: FillConfig) -> None:
    tokenizer = build_tokenizer(fills.tokenizer)
    document = [*tokenizer.tokenize("fox"), fills.end_token]
    config = replace(fills, rate=0.3, spm_rate=0.9)
    found = rearranged(document * 4000, config, tokenizer, random())
    assert found.count(config.end_token) == 4000
    moved = found.count(config.prefix_token)
    assert moved / 4000 == pytest.approx(0.3, abs=0.03)
    places = [n for n, token in enumerate(found) if token == config.prefix_token]
    at_once = sum(found[n + 1] == config.suffix_token for n in places)
    assert at_once / moved == pytest.approx(0.9 + 0.1 * 4 / 10, abs=0.03), "an empty prefix too"
    whole = replace(fills, rate=0.0)
    assert rearranged(document * 9, whole, tokenizer, random()) == document * 9


def test_fragments_are_moved_one_by_one(fills: FillConfig) -> None:
    tokenizer = build_tokenizer(fills.tokenizer)
    (mark,) = tokenizer.tokenize("<file_sep>")
    files = [tokenizer.tokenize(text) for text in ("fox", "dog", "keep it", "lazy")]
    document = [*files[0], mark, *files[1], mark, mark, *files[2], mark, *files[3]]
    config = replace(fills, rate=1.0, fragment_rate=1.0, split_token=mark, no_prefix="keep")
    found = rearranged([*document, fills.end_token], config, tokenizer, random())
    assert found.pop() == fills.end_token
    pieces: list[list[int]] = [[]]
    for token in found:
        if token == mark:
            pieces.append([])
        else:
            pieces[-1].append(token)
    assert [text_of(pieces[n], config, tokenizer) for n in (0, 1, 4)] == ["fox", "dog", "lazy"]
    assert pieces[2:4] == [[], files[2]]
    seldom = replace(config, fragment_rate=0.0)
    assert rearranged(document, seldom, tokenizer, random()) == document


def read(dataset: Any, numbers: range) -> list[list[int]]:
    rows: list[list[int]] = []
    for number in numbers:
        out: NDArray[np.int64] = np.empty(dataset.seq_length + 1, np.int64)
        dataset.read(number, out)
        rows.append(out.tolist())
    return rows


def test_samples_are_the_same_whoever_reads_them(folder: Path, corpus: Path) -> None:
    """In any order; and they are those of the corpus but for what was moved."""
    data = run_config(
        folder, "--fim-data --fim-rate 0.1 --split 6,4,0", f"--data-path {corpus}"
    ).data
    vocabulary = build_tokenizer(data.fill.tokenizer).vocab_size
    made = build_datasets(data, (40, 40, 0), vocabulary)
    plain = build_datasets(replace(data, fill=None), (40, 40, 0), vocabulary)
    assert isinstance(made.train, FilledDataset)
    rows = read(made.train, range(40))
    assert rows[20:] + rows[:20] == read(made.train, range(20, 40)) + read(made.train, range(20))
    before = read(plain.train, range(40))
    changed = sum(one != other for one, other in zip(rows, before, strict=True))
    assert 5 < changed < 35
    assert plain.train is not None
    other_seed = build_datasets(replace(data, seed=data.seed + 1), (40, 0, 0), vocabulary)
    assert read(other_seed.train, range(40)) != rows
    assert read(FilledDataset(plain.train, data.fill, seed=data.seed, split=1), range(40)) != rows


class OneSample:
    """A dataset of one sample."""

    masked_token: int | None = None

    def __init__(self, tokens: list[int]) -> None:
        self._tokens, self.seq_length = tokens, len(tokens) - 1

    def __len__(self) -> int:
        return 1

    def read(self, index: int, out: NDArray[np.int64]) -> None:
        out[:] = self._tokens


def test_a_sample_keeps_its_length(fills: FillConfig) -> None:
    tokenizer = build_tokenizer(fills.tokenizer)
    config = replace(fills, rate=1.0)
    long = OneSample(tokenizer.tokenize("the quick brown fox"))
    (found,) = read(FilledDataset(long, config, seed=1, split=0), range(1))
    assert found[0] == config.prefix_token
    single = [ids for byte in "the quick brown fox " * 3 for ids in tokenizer.tokenize(byte)]
    (found,) = read(FilledDataset(OneSample(single), config, seed=1, split=0), range(1))
    assert len(found) == len(single)
    pads = found.count(config.pad_token)
    assert found[-pads:] == [config.pad_token] * pads != [], "whole words take fewer tokens"


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
    assert run_config(folder, "").data.fill is None
    notes = run_config(folder, "--fim-rate 0.1").notes
    assert "--fim-rate 0.1 changes nothing without --fim-data" in notes
    found = run_config(
        folder,
        "--fim-data --fim-rate 0.9 --fim-spm-rate 0.1 --fim-split-sample <file_sep> "
        "--fim-no-prefix # --fim-pad-token <|endoftext|>",
    ).data.fill
    assert (found.rate, found.spm_rate, found.fragment_rate) == (0.9, 0.1, 0.9)
    tokenizer = build_tokenizer(found.tokenizer)
    ids = found.prefix_token, found.middle_token, found.suffix_token, found.split_token
    words = "<fim_prefix><fim_middle><fim_suffix><file_sep>"
    assert list(ids) == tokenizer.tokenize(words)
    assert found.pad_token == found.end_token == tokenizer.eod
    assert found.no_prefix == "#"
