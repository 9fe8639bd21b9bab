"""What ``--without`` forbids is in no way of an answer, and what it cannot mean is refused."""

import re
from functools import cache

import pytest
from planning.test_explored import WORDS

from megatron.commands.plan_pretraining import main
from megatron.planning.answer import Answer
from megatron.planning.asked.question import question_of
from megatron.planning.asked.unwanted import Unwanted, unwanted_of
from megatron.planning.propose import propose
from megatron.run.edit import Edit, left_out, set_to


@cache
def answered(*unwanted: str) -> Answer:
    words = [word for name in unwanted for word in ("--without", name)]
    return propose(question_of([*WORDS, "--explore", "unused", *words], None))


def lines(answer: Answer) -> list[str]:
    """The flags of every way that the search has looked at, and of the answer itself."""
    ways = [own.proposal for own in answer.seen]
    return [" ".join(way.words) + " " for way in (answer.taken, *answer.runners_up, *ways)]


def test_a_flag_that_is_not_wanted_is_in_no_way() -> None:
    assert any("--main-grads-dtype" in line for line in lines(answered()))
    found = lines(answered("main-grads-dtype"))
    assert found
    assert not any("--main-grads-dtype" in line for line in found)
    assert answered("main-grads-dtype").taken.seconds >= answered().taken.seconds


def test_a_value_that_is_not_wanted_is_in_no_way() -> None:
    free = answered()
    taken = re.search(r"--vocab-parallel (\S+)", lines(free)[0])
    assert taken is not None
    found = lines(answered(f"vocab-parallel={taken[1]}"))
    assert not any(f"--vocab-parallel {taken[1]} " in line for line in found)
    assert any("--vocab-parallel" in line for line in found)


def test_without_whole_vocabularies_there_is_nothing_to_compare_with() -> None:
    answer = answered("vocab-parallel=none", "vocab-parallel=redis")
    assert answer.unsplit is None
    assert "--vocab-parallel vocab-" in lines(answer)[0]


@pytest.mark.parametrize("text", ["a-b", "--a-b", " a-b "])
def test_a_flag_is_read_with_and_without_dashes(text: str) -> None:
    assert unwanted_of(text) == Unwanted("--a-b")
    assert unwanted_of(f"{text.strip()}=1 2") == Unwanted("--a-b", "1 2")


def test_what_edits_ask_for() -> None:
    edits = (set_to("--a", 1, 2), left_out("--b"), Edit("--c"))
    having = {name: unwanted_of(name).is_in(edits) for name in ("a", "a=1 2", "a=1", "b", "c", "d")}
    assert having == {"a": True, "a=1 2": True, "a=1": False, "b": False, "c": True, "d": False}


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["="], "--without =: give the name of a flag, as tp-comm-overlap or"),
        (["x="], "--without x=: give the name of a flag"),
        (["tp-com-overlap", "lr"], "--without tp-com-overlap: did you mean tp-comm-overlap? the"),
        (["tp-com-overlap", "lr"], "--without lr: "),
        (["vocab-parallel"], "--without vocab-parallel: no choice makes a run. A flag that every"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    names: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*WORDS, *(word for name in names for word in ("--without", name))])
    assert told in f"{capsys.readouterr().err}{ended.value}"
