"""Conditions on flags: one language, judged by the words of a line or by values."""

import itertools

import pytest

from megatron.flags.conditions import Truth, holds
from megatron.run.foreign.answers import ANSWERS
from megatron.run.foreign.line import Line
from megatron.run.topics import DECLARED

LINE = Line({"--a": ["3"], "--b": [], "--c": ["fast", "mode"], "--d": ["0.5"], "--n": ["8"]}, 6)


@pytest.mark.parametrize(
    ("condition", "truth"),
    [
        ("--a", True),
        ("--z", False),
        ("not --z", True),
        ("not not --z", False),
        ("--z or --a", True),
        ("--a and --z", False),
        ("--z and --z or --a", True),
        ("--a or --a and --z", True),
        ("not --a or --b", True),
        ("--a 3", True),
        ("--a 4", False),
        ("--c *mode", True),
        ("--c fast", False),
        ("--z 3", False),
        ("--a > 2", True),
        ("--a == --a", True),
        ("--a == --n", False),
        ("--z == --z", False),
        ("--z < 1", False),
        ("--c < 1", False),
        ("(--z else 1) <= 1", True),
        ("(--c else 7) == 7", True),
        ("(--z else (--y else 2) + 3) == 5", True),
        ("2 < --a <= 3", True),
        ("3 < --a <= 3", False),
        ("--n % --a == 2", True),
        ("--n % 0 == 0", True),
        ("--n * --d + 1 == 5", True),
        ("1 + --n * --d == 5", True),
        ("replicas == 6", True),
        ("without --y and --z", True),
        ("without --z and --b", False),
        ("beside --z or --b", True),
        ("beside --y or --z", False),
        ("at --z 1", True),
        ("at --a 1", False),
    ],
)
def test_conditions_on_words(condition: str, truth: bool) -> None:
    assert holds(condition, LINE) is truth


class Known:
    """Flags of which some have no value that is known."""

    def __init__(self, **truths: Truth) -> None:
        self.truths = truths

    def asks(self, option: str) -> Truth:
        return self.truths[option.strip("-")]

    def has(self, option: str, pattern: str) -> Truth:
        raise NotImplementedError

    def number(self, name: str) -> float:
        raise NotImplementedError


@pytest.mark.parametrize("values", list(itertools.product((True, False, None), repeat=3)))
def test_what_is_not_known_decides_nothing(values: tuple[Truth, Truth, Truth]) -> None:
    """A condition is true or false exactly if it is so whatever the unknown flags are."""
    ways = itertools.product(*((True, False) if v is None else (v,) for v in values))
    wanted = {(a and not b) or c for a, b, c in ways}
    found = holds("--a and not --b or --c", Known(**dict(zip("abc", values, strict=True))))
    assert found is (wanted.pop() if len(wanted) == 1 else None)


@pytest.mark.parametrize(
    "condition", ["--a and", "--a 3 4", "(--a else 1", "5", "--a ; --b", "not"]
)
def test_a_condition_that_is_none_is_our_mistake(condition: str) -> None:
    with pytest.raises((AssertionError, IndexError)):
        holds(condition, LINE)


def test_all_conditions_that_are_written_down_can_be_judged() -> None:
    facts = [declared.facts for declared in DECLARED.values()]
    of_flags = [(f.needs, f.excludes, f.idle_without, f.idle_with) for f in facts]
    of_table = [answer.condition for _, answer in ANSWERS.rows]
    for condition in {*itertools.chain(*of_flags), *of_table} - {""}:
        assert holds(condition, Line({})) in (True, False)
