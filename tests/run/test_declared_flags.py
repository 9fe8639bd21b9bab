"""A flag is one line: what follows from its declaration alone, for every flag there is."""

import math
import re
from dataclasses import MISSING, dataclass
from typing import Any

import pytest
from command_lines import with_flags

from megatron.flags.checks import idle_notes, pairing_mistakes, value_mistakes
from megatron.flags.declare import Declaration, flag
from megatron.flags.groups import all_declarations, copied, declarations, filled
from megatron.flags.help import help_text
from megatron.flags.ranges import COUNT
from megatron.model.settings import ShapeSettings
from megatron.run.command_line import parse
from megatron.run.foreign.answers import ANSWERS
from megatron.run.topics import DECLARED, GROUPS
from megatron.run.words import sort_words

RUN = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 32 --micro-batch-size 2 "
    "--lr 1e-3 --train-iters 10 --vocab-size 999 --device cpu --dry-run --bf16"
)


def told(flags: str, usual: str = RUN) -> list[str]:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the callers look at the lines
        parse(with_flags(usual.split(), flags.split()), world_size=1)
    return str(caught.value).splitlines()


def conditions(facts: str) -> list[str]:
    return [condition for condition in facts.split(" or ") if condition]


@pytest.mark.parametrize("declared", DECLARED.values(), ids=DECLARED)
def test_every_flag_has_a_meaning_and_a_default_in_words(declared: Declaration) -> None:
    assert re.fullmatch(r"\S.*\.", declared.facts.help)
    assert declared.default_words
    assert declared.default is not None or declared.facts.unset


@pytest.mark.parametrize(
    "declared", [d for d in DECLARED.values() if d.facts.range], ids=lambda d: d.option
)
def test_numbers_outside_a_range_are_refused(declared: Declaration) -> None:
    allowed = declared.facts.range
    assert allowed is not None
    numbers = [-1, 0] if declared.kind is int else [-1.0, 0.0, 1.0, 1.5, math.inf, math.nan]
    for number in numbers:
        lines = told_of_value(declared, number)
        assert (f"{declared.shown(number)}: must be {allowed.words}" in lines) == (
            not allowed.contains(number)
        )
    assert any(not allowed.contains(number) for number in numbers)


def told_of_value(declared: Declaration, value: object) -> list[str]:
    return [line for _, line in value_mistakes(DECLARED, {declared.option: value})]


@pytest.mark.parametrize("declared", DECLARED.values(), ids=DECLARED)
def test_defaults_lie_in_their_range(declared: Declaration) -> None:
    if declared.default not in (None, MISSING, ()) and declared.facts.range is not None:
        given = declared.default
        for number in given if isinstance(given, tuple) else (given,):
            assert isinstance(number, (int, float))
            assert declared.facts.range.contains(number)


def test_no_two_nodes_have_a_field_of_one_name() -> None:
    """Mistakes of a value and conflicts of its flags are found by the name of its field."""
    named = [(own.name, group) for group in GROUPS for own in declarations(group)]
    assert len(set(named)) == len({name for name, _ in named})


def test_conditions_name_flags_and_values_that_exist() -> None:
    for declared in DECLARED.values():
        facts = declared.facts
        all_of_them = (facts.needs, facts.excludes, facts.idle_without, facts.idle_with)
        for condition in (condition for words in all_of_them for condition in conditions(words)):
            other, _, word = condition.partition(" ")
            assert other in DECLARED
            assert not word or not DECLARED[other].choices or word in DECLARED[other].choices


def test_all_mistakes_are_told_at_once_each_by_its_flag() -> None:
    """Unknown, refused, unreadable, missing, out of range, without effect, contradicting."""
    lines = told(
        "--no-such-flag 1 2 --recompute-in-bubble --ds-sequence-parallel-size 2 --seed x"
        " --attention-dropout 2 --save-measured-costs c --num-attention-heads 7"
        " --global-batch-size 3 --enable-zero-bubble --pipeline-schedule gpipe --replan"
        " --fp4-format e2m1",
        usual=RUN.replace("--lr 1e-3", ""),
    )
    expected = [
        "--no-such-flag",
        "--recompute-in-bubble",
        "--ds-sequence-parallel-size 2",
        "--seed x",
        "--fp4-format e2m1",
        "--attention-dropout 2.0",
        "--lr is missing",
        "--save-measured-costs c",
        "--replan",
        "--num-attention-heads 7",
        "--enable-zero-bubble",
        "--global-batch-size 3",
    ]
    assert len(lines) == len(expected)
    for line, begin in zip(lines, expected, strict=True):
        assert line.startswith(begin)


def test_one_mistake_is_told_once() -> None:
    """The rules that divide by the number of heads are silent where it is a mistake itself."""
    assert told("--num-attention-heads 0 --position-embedding-type rope") == [
        "--num-attention-heads 0: must be at least 1 and at most 16,777,216"
    ]
    assert len(told("--micro-batch-size two --global-batch-size 3")) == 1
    assert len(told("--eval-interval often --eval-iters 5")) == 1


def test_a_misspelt_flag_is_corrected() -> None:
    assert told("--num-layer 3") == [
        "--num-layer is no flag: did you mean --num-layers? see --help"
    ]


@dataclass(frozen=True)
class MoreModelFlags(ShapeSettings):
    """The shape of a model, and further flags."""

    swiglu: bool = flag(False, "A gate.")
    embedding_multiplier: float = flag(1.0, "Factor of the embedding.", COUNT, needs="--swiglu")
    embedding_noise: float = flag(0.0, "Noise of the embedding.", idle_without="--swiglu")
    noisy_layers: tuple[int, ...] = flag((), "Layers with noise.", COUNT, metavar="N ...")


@dataclass(frozen=True)
class MultipliedConfig:
    """What the new flag is for."""

    num_layers: int
    embedding_multiplier: float
    width: int


def test_a_flag_may_have_several_numbers() -> None:
    declared = all_declarations((MoreModelFlags,))

    def told(words: str) -> tuple[list[str], tuple[int, ...]]:
        found = sort_words(f"--noisy-layers {words}".split(), declared)
        layers = filled([MoreModelFlags], found.given)[MoreModelFlags].noisy_layers
        faults = [fault for _, fault in value_mistakes(declared, {"--noisy-layers": layers})]
        return [*found.mistakes, *faults], layers

    assert told("2 1") == ([], (2, 1))
    assert told("2 0") == (
        ["--noisy-layers 2 0: must be at least 1 and at most 1,000,000,000"],
        (2, 0),
    )
    assert told("2 x y") == (["--noisy-layers x: must be a whole number"], ())
    assert told("") == (["--noisy-layers: nothing stands behind it; give N ..."], ())


def test_one_line_makes_a_flag() -> None:
    """It is parsed, told in the help, checked and copied to the field of its name."""
    declared = all_declarations((MoreModelFlags,))
    assert "--embedding-multiplier FLOAT\n        Factor of the embedding. (default: 1.0)" in (
        help_text("", "", [MoreModelFlags])
    )
    line = "--num-layers 4 --hidden-size 8 --seq-length 3"

    def read(more: str) -> Any:
        found = sort_words(f"{line} {more}".split(), declared)
        assert not found.mistakes
        return filled([MoreModelFlags], found.given)[MoreModelFlags]

    def mistakes(model: MoreModelFlags) -> list[str]:
        values = {"--" + name.replace("_", "-"): value for name, value in vars(model).items()}
        faults = [text for _, text in value_mistakes(declared, values)]
        return [*faults, *pairing_mistakes(declared, values)]

    model = read("--embedding-multiplier 12 --swiglu")
    assert mistakes(model) == []
    made = copied(MultipliedConfig, model, width=5)
    assert made == MultipliedConfig(num_layers=4, embedding_multiplier=12.0, width=5)
    assert copied(MultipliedConfig, read(""), width=5).embedding_multiplier == 1.0
    with pytest.raises(AssertionError, match="width"):
        copied(MultipliedConfig, model)
    assert mistakes(read("--embedding-multiplier 0.5")) == [
        "--embedding-multiplier 0.5: must be at least 1 and at most 1,000,000,000",
        "--embedding-multiplier 0.5 has no effect by itself: add --swiglu, or leave it out",
    ]
    noise = {"--embedding-noise": 0.1, "--swiglu": False}
    assert not list(pairing_mistakes(declared, noise))
    assert list(idle_notes(declared, noise)) == [
        "--embedding-noise 0.1 changes nothing without --swiglu"
    ]
    assert not list(idle_notes(declared, {"--embedding-noise": 0.1, "--swiglu": True}))
    assert not list(idle_notes(declared, {"--embedding-noise": 0.0, "--swiglu": False}))


WORDS = [own for own in DECLARED.values() if own.choices and not own.facts.reads]


@pytest.mark.parametrize("declared", WORDS, ids=lambda own: own.option)
def test_a_word_without_its_last_letter_is_answered_with_the_nearest(declared: Declaration) -> None:
    """Every flag and every word of every flag; another word may be as near."""
    for word in (choice for choice in declared.choices if len(choice) > 3):
        fault = declared.unreadable([word[:-1]])
        if word[:-1] not in declared.choices and fault is not None:
            asked = re.match(
                rf"{declared.option} {re.escape(word[:-1])}: did you mean (\S+)\? choose", fault
            )
            assert asked is not None, fault
            assert asked[1] in declared.choices


@pytest.mark.parametrize("option", DECLARED)
def test_a_flag_without_its_last_letter_is_answered_with_the_nearest(option: str) -> None:
    """Some beginnings of a flag are flags themselves, or flags of Megatron-LM with an answer."""
    cut_short = option[:-1]
    found = sort_words([cut_short, "1"], DECLARED)
    asked = f"{cut_short} is no flag: did you mean --"
    if not any(line.startswith(asked) for line in found.mistakes):
        assert cut_short in DECLARED or ANSWERS.of(cut_short)
