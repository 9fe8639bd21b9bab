"""Whatever is written behind a flag: it is told by name, with all other mistakes, and soon."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import get_origin

import pytest
from harness.properties import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.flags.declare import Declaration
from megatron.run.command_line import parse, read
from megatron.run.topics import DECLARED

LONGEST = 400
"""Characters of a line about a mistake."""

NOT_A_NUMBER = ("", "abc", "1,5", "0x10", "\u00e9", "a\0b", "\udcff", "9" * 5000, "-", "--5")
NOT_WHOLE = (*NOT_A_NUMBER, "1.5", "1e9", "nan", "inf", "9" * 19, "-" + "9" * 30)
NOT_IN_RANGE = (-1, 0, 1, 10**9, 10**12, 10**18 - 1, float("nan"), float("inf"), -1e400, 1.5)


def bad_words(declared: Declaration) -> Iterator[list[str]]:
    """Yield words behind a flag that make no value of it."""
    if declared.kind is bool:
        yield from (["1"], ["true"], [""], ["a\0b"])
        return
    yield []
    if declared.kind in (int, float):
        facts, whole = declared.facts, declared.kind is int
        for word in NOT_WHOLE if whole else NOT_A_NUMBER[:7]:
            yield [word]
        for number in NOT_IN_RANGE:
            if facts.range and not facts.range.contains(number) and number == number // 1:
                yield [str(int(number) if whole else number)]
    elif declared.choices:
        yield from (["bogus"], ["\u00e9"], [""], ["a\0b"], [declared.choices[0], "more"])
    else:
        yield from ([""], ["a\0b"], ["-x"])
        if get_origin(declared.kind) is not tuple:
            yield ["one", "two"]


BAD = {option: list(bad_words(declared)) for option, declared in DECLARED.items()}
ROUNDS = max(map(len, BAD.values()))


@pytest.mark.parametrize("number", range(ROUNDS))
def test_every_flag_with_a_bad_value_is_told_at_once(number: int) -> None:
    """Each flag stands on one command line with its own bad value of this number."""
    given = {option: words[number] for option, words in BAD.items() if number < len(words)}
    argv = [word for option, words in given.items() for word in (option, *words)]
    found = read(argv, world_size=1, speak=False)
    told = (*found.mistakes, *found.notes)  # some mean something in Megatron, which is noted
    untold = {
        option: words
        for option, words in given.items()
        if not any(line.startswith((f"{option}:", f"{option} ")) for line in told)
    }
    assert not untold
    assert len(found.mistakes) > 0.9 * len(given)
    assert not [line for line in told if len(line) > LONGEST or "\n" in line]


WORDS = st.one_of(
    st.sampled_from([*DECLARED, "--nope", "--", "-x", "--num_layers=4", "--data-path"]),
    st.sampled_from(["", "0", "-1", "1", "4", "1e9", "nan", "1000000000", "1,2", "Et|tL", "auto"]),
    st.text(max_size=5),
)


@settings(max_examples=examples(40))
@given(st.lists(WORDS, max_size=12))
def test_any_words_make_flags_or_lines_that_begin_with_one(words: list[str]) -> None:
    found = read([word for word in words if word not in ("-h", "--help")], 1, speak=False)
    for line in (*found.mistakes, *found.notes):
        assert line.startswith("--") or "stands before any flag" in line
    assert found.mistakes, "most flags are required"


USUAL = {
    "--num-layers": "4",
    "--hidden-size": "64",
    "--num-attention-heads": "4",
    "--seq-length": "16",
    "--micro-batch-size": "1",
    "--train-iters": "10",
    "--lr": "1e-3",
    "--vocab-size": "99",
}


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ("--num-layers 1000000000", "--num-layers 1000000000: must be at least 1 and at most 100,"),
        ("--hidden-size 1000000000", "--hidden-size 1000000000: must be at least 1 and at most 16"),
        (
            "--global-batch-size 1000000000",
            "--global-batch-size 1000000000 is too much: 1,000,000,000 microbatches x 1 chunk(s) x "
            "1 rank(s) are 1,000,000,000 forward passes an iteration, and a plan has at most "
            "4,000,000: lower it, or raise --micro-batch-size",
        ),
        (
            "--pipeline-model-parallel-size 50000 --global-batch-size 1000",
            "--pipeline-model-parallel-size 50000 is too much: 1,000 microbatches x 1 chunk(s)",
        ),
        (
            "--num-virtual-stages-per-pipeline-rank 90000 --pipeline-model-parallel-size 2 "
            "--global-batch-size 100",
            "--num-virtual-stages-per-pipeline-rank 90000 is too much: 100 microbatches x 90,000",
        ),
        (
            "--pipeline-model-parallel-size 2 --vocab-parallel redis --final-stage-num-layers 99",
            "--final-stage-num-layers 99 is more than --num-layers 4: give 0 to 4",
        ),
        (
            "--vocab-parallel redis --final-stage-num-layers 3",
            "--final-stage-num-layers 3 is not --num-layers 4, and there is one stage: leave it",
        ),
        (
            "--pipeline-model-parallel-size 2 --layer-distribution 2,1000000000",
            "--layer-distribution 2,1000000000: give even, remainder, cost, redis, or a number",
        ),
        ("--link-bandwidth 1e-9", "--link-bandwidth 1e-09: must be at least 0.001 and at most"),
        ("--link-latency 1e9", "--link-latency 1000000000.0: must be at least 0 and at most"),
        ("--network-bandwidth 1e300", "--network-bandwidth 1e+300: must be at least 0.001 and at"),
        ("--network-latency 1e300", "--network-latency 1e+300: must be at least 0 and at most"),
        (
            f"--pipeline-model-parallel-layout Et*{'9' * 5000}L",
            f"t*{'9' * 20}... is too long a pipeline: lower the {'9' * 20}...",
        ),
    ],
)
def test_numbers_that_would_be_looped_over_are_refused_before(flags: str, wanted: str) -> None:
    words = [word for flag, value in USUAL.items() for word in (flag, value) if flag not in flags]
    with pytest.raises(ValueError, match=r".+") as told:
        parse([*words, "--bf16", "--dry-run", *flags.split()], 1, speak=False)
    assert wanted in str(told.value)


@pytest.mark.parametrize("option", DECLARED)
def test_a_message_shows_no_endless_and_no_invisible_word(option: str) -> None:
    """5,000 digits are an accident, and so is a space of no width from a web page."""
    words = [w for flag, value in USUAL.items() for w in (flag, value) if flag != option]
    for value in ("9" * 5000, "\u200b1"):
        try:
            parse([*words, "--dry-run", "--bf16", option, value], 1, speak=False)
        except ValueError as error:
            told = str(error)
            assert max(map(len, told.split())) <= 300
            assert all(character.isprintable() or character == "\n" for character in told)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (
            "--layer-distribution None",
            "--layer-distribution None: give even, remainder, cost, redis, or",
        ),
        (
            "--pipeline-model-parallel-layout None",
            "--pipeline-model-parallel-layout None: 'N' is no layer",
        ),
        ("--num-gpus 8", "give torchrun --nproc-per-node 8 before pretrain_gpt.py, or GPUS_PER"),
    ],
)
def test_words_of_other_programs_are_refused_with_the_way_out(flags: str, told: str) -> None:
    words = [word for flag, value in USUAL.items() for word in (flag, value)]
    with pytest.raises(ValueError, match=r".") as refused:
        parse([*words, "--dry-run", "--bf16", *flags.split()], 1, speak=False)
    assert told in str(refused.value)


def test_long_runs_are_no_mistake(tmp_path: Path) -> None:
    """Made-up samples take no room, and an interval may be never."""
    words = [word for flag, value in USUAL.items() for word in (flag, value)]
    never = ["--save", str(tmp_path), "--save-interval", "1000000000000"]
    config = parse([*words, "--mock-data", "--train-iters", "1000000000", *never], 1)
    assert config.train.train_iters == 10**9
    assert dataclasses.asdict(config.checkpoint)["save_interval"] == 10**12
