"""The flags of windows, patterns of layers and factors: what they mean, and what is wrong."""

import pytest
from command_lines import with_flags
from hypothesis import given
from hypothesis import strategies as st

from megatron.layers.patterns import LayerPattern
from megatron.layers.settings import read_window
from megatron.model.settings import ModelSettings
from megatron.run.command_line import parse, read

BASE = (
    "--num-layers 6 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 "
    "--train-iters 1 --lr 1e-3 --mock-data --vocab-size 63 --device cpu"
)


def model(flags: str) -> ModelSettings:
    return parse(with_flags(BASE.split(), flags.split()), 1, speak=False).model


@pytest.mark.parametrize(("words", "window"), [("4,0", 4), ("(128, 0)", 128), ("0,0", 0)])
def test_a_window_is_the_number_of_earlier_positions(words: str, window: int) -> None:
    assert read_window(words) == window


@pytest.mark.parametrize("words", ["4", "4,4", "a,0", "4,0,0", "", "-1,0"])
def test_what_is_no_window_of_a_gpt(words: str) -> None:
    with pytest.raises(ValueError, match="give"):
        read_window(words)


@pytest.mark.parametrize(
    ("words", "last", "pattern"),
    [
        ("2", 0, (1, 0)),
        ("3", 1, (0, 0, 1)),
        ("1", 0, (0,)),
        ("[1,1,0]*2", 0, (1, 1, 0, 1, 1, 0)),
        ("2*[1,1,0]", 0, (1, 1, 0, 1, 1, 0)),
        ("([0]*2+[1]*1)*2", 1, (0, 0, 1, 0, 0, 1)),
        ("[0,0,0,1,1,1]", 0, (0, 0, 0, 1, 1, 1)),
    ],
)
def test_a_pattern_is_a_number_or_a_list_as_in_megatron(
    words: str, last: int, pattern: tuple[int, ...]
) -> None:
    own = LayerPattern.read(words)
    assert own.fault(6) is None
    repeated = pattern * 6
    assert tuple(own.entry(layer, last) for layer in range(6)) == repeated[:6]


OPTION = "--window-attn-skip-freq"


@pytest.mark.parametrize(
    "words",
    [
        "0",
        "-2",
        "7",
        "1.5",
        "[1,0]",
        "[1,0]*4",
        "[2]*6",
        "[1,1,0]*2*[1]",
        "[1]*10**9",
        "[1,0]*1000000000",
        "6*1",
        "[1]+1",
        "__import__('os').getcwd()",
        "[True]*6",
        "[1,1,0",
        "x",
    ],
)
def test_what_is_no_pattern_of_six_layers(words: str) -> None:
    [mistake] = read(with_flags(BASE.split(), ["--window-size", "2,0", OPTION, words]), 1).mistakes
    assert mistake.startswith(OPTION)


def test_every_second_layer_sees_all() -> None:
    gemma = model("--window-size 8,0 --window-attn-skip-freq 2")
    assert [gemma.window_of(layer) for layer in range(6)] == [8, None, 8, None, 8, None]
    assert [model("--window-size 8,0").window_of(layer) for layer in range(6)] == [8] * 6
    nope = model("--position-embedding-type rope --no-rope-freq 3")
    assert [nope.positions.rotates(layer) for layer in range(6)] == [True, True, False] * 2


def test_factors_may_follow_from_sizes() -> None:
    assert model("--query-pre-attn-scalar 25").attention.softmax_scale == 0.2
    assert model("--softmax-scale 0.3").attention.softmax_scale == 0.3
    assert model("").attention.softmax_scale is None
    assert model("--scale-embeddings-by-hidden-size").vocabulary.embedding_multiplier == 8
    assert model("--embedding-multiplier 12").vocabulary.embedding_multiplier == 12


def test_a_gated_gelu_is_as_wide_as_swiglu() -> None:
    assert model("--geglu").mlp.ffn_hidden_size == model("--swiglu").mlp.ffn_hidden_size
    assert model("--geglu").mlp.function == "geglu"


def test_further_tokens_are_predicted_as_megatron_says() -> None:
    assert model("").further.mtp_num_layers == 0
    deep = model("--mtp-num-layers 2 --position-embedding-type rope")
    assert (deep.further.mtp_num_layers, deep.further.mtp_loss_scaling_factor) == (2, 0.1)


@pytest.mark.parametrize(
    ("flags", "mistakes"),
    [
        ("--window-size 4,4 --window-attn-skip-freq x", ["--window-size", "--window-attn"]),
        ("--position-embedding-type rope --no-rope-freq 9", ["--no-rope-freq 9 is beyond"]),
        ("--geglu --swiglu", ["--geglu does not go with --swiglu"]),
        ("--softmax-scale 1 --query-pre-attn-scalar 4", ["--softmax-scale 1.0 does not go with"]),
        ("--position-embedding-type rope --rotary-base-local 5", ["--rotary-base-local 5"]),
        ("--softmax-scale 0", ["--softmax-scale 0.0: must be"]),
        ("--mtp-num-layers 1", ["--mtp-num-layers 1 with --position-embedding-type learned_abso"]),
        (
            "--mtp-num-layers 32 --position-embedding-type alibi --embed-layernorm",
            ["--mtp-num-layers 32 predicts tokens", "--mtp-num-layers 32 with --embed-layernorm"],
        ),
        (
            "--mtp-num-layers 2 --mtp-loss-scaling-factor 0 --position-embedding-type none",
            ["--mtp-loss-scaling-factor 0.0: must be"],
        ),
    ],
)
def test_contradictions_are_told_together(flags: str, mistakes: list[str]) -> None:
    found = read(with_flags(BASE.split(), flags.split()), 1).mistakes
    assert len(found) == len(mistakes), found
    for line, beginning in zip(found, mistakes, strict=True):
        assert line.startswith(beginning)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--window-size 31,0", "--window-size 31,0 changes nothing: a sample has 32 tokens"),
        ("--window-attn-skip-freq 2", "--window-attn-skip-freq 2"),
        ("--parallel-layernorm", "--parallel-layernorm"),
        ("--no-rope-freq 2", "--no-rope-freq 2"),
        ("--mtp-loss-scaling-factor 0.3", "--mtp-loss-scaling-factor 0.3"),
    ],
)
def test_what_changes_nothing_is_noted(flags: str, told: str) -> None:
    found = read(with_flags(BASE.split(), flags.split()), 1)
    assert not found.mistakes
    assert any(note.startswith(told) for note in found.notes), found.notes


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ([1, 0, 1, 1], "[1,0,1,1]"),
        ([0] * 3 + [1] * 58, "[0]*3+[1]*58"),
        ([1] * 48, "[1]*48"),
        ([0, 1] * 24, "[0,1]*24"),
    ],
)
def test_a_long_pattern_has_short_words(pattern: list[int], words: str) -> None:
    assert str(LayerPattern(listed=tuple(pattern))) == words


@given(st.lists(st.integers(0, 1), min_size=1, max_size=12), st.integers(1, 6))
def test_the_words_of_a_pattern_are_read_as_the_pattern(entries: list[int], times: int) -> None:
    pattern = LayerPattern(listed=tuple(entries * times))
    words = str(pattern)
    assert LayerPattern.read(words) == pattern
    assert len(words) <= len(str(list(pattern.listed)))


@given(st.lists(st.integers(0, 1), min_size=1, max_size=12), st.integers(0, 1), st.booleans())
def test_the_shortest_pattern_has_the_same_entries(
    entries: list[int], last: int, first: bool
) -> None:
    pattern = LayerPattern.of(entries, last, first)
    assert [pattern.entry(i, last, first) for i in range(len(entries))] == entries
    assert pattern.fault(len(entries)) is None
