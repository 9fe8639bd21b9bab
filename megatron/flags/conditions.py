"""A language for conditions on flags: in declarations, and in the table of other projects' flags.

    --profile                             the flag is given, and is neither off nor 0
    --lr-decay-style constant             the flag has this value; * stands for any characters, and
                                          + between letters is a part of the value
    not A      A and B      A or B        "not" binds most, "or" least
    0 < --num-layers % 2 <= replicas      numbers of flags, quantities of the line; +, * and %
    (--tensor-model-parallel-size else 1) the second number if the first flag has no number

A text that a user reads too may have three more forms: "without --a and --b" (neither is given),
"beside --a or --b" (one of them is given), and "at --size 1" (the flag is 1 or less, or not given).

A condition may be neither true nor false, because a flag that is a mistake itself has no value.
"""

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Final, Protocol

Truth = bool | None
"""Whether a condition holds; ``None``: this is not known."""


class Readable(Protocol):
    """The subject of conditions: a command line, or the values that were read from it."""

    def asks(self, option: str) -> Truth:
        """Whether a flag is given, and is neither off nor 0."""

    def has(self, option: str, pattern: str) -> Truth:
        """Whether the value of a flag matches a pattern, in which * stands for any characters."""

    def number(self, name: str) -> float:
        """The number of a flag, or a quantity that the line comes to; NaN if there is none."""


Test = Callable[[Readable], Truth]
Number = Callable[[Readable], float]


def alternatives(condition: str) -> Sequence[str]:
    """Return the conditions that "or" joins in a text; an empty text has none."""
    return condition.split(" or ") if condition else ()


def holds(condition: str, line: Readable) -> Truth:
    """Return whether a condition holds; ``None``: this is not known."""
    return _test_of(condition)(line)


@cache
def _test_of(condition: str) -> Test:
    reader = _Reader(_plain(condition))
    test = reader.either()
    assert reader.next_word is None, f"{condition}: {reader.next_word} stands too much"
    return test


def _plain(condition: str) -> str:
    """Return a condition in the plain language, without the forms for users."""
    kind, _, rest = condition.partition(" ")
    if kind == "without":
        return " and ".join(f"not {option}" for option in rest.split(" and "))
    if kind == "at":
        option, size = rest.split()
        return f"({option} else 1) <= {size}"
    return rest if kind == "beside" else condition


_WORD: Final = re.compile(r"--[\w-]+|[<>=!]=|[<>%+()]|\*(?!\w)|[*\w](?:[\w.*-]|\+(?=[a-z]))*")
_COMPARISONS: Final[Mapping[str, Callable[[float, float], bool]]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
_BESIDE_NUMBERS: Final = frozenset((*_COMPARISONS, "+", "*", "%", "else"))


class _Reader:
    """Reads a condition from left to right, with a method for each level of binding."""

    def __init__(self, text: str) -> None:
        self._words = _WORD.findall(text)
        assert "".join(self._words) == text.replace(" ", ""), f"{text} is no condition"

    @property
    def next_word(self) -> str | None:
        return self._words[0] if self._words else None

    def either(self) -> Test:
        tests = [self._both()]
        while self._take("or"):
            tests.append(self._both())
        return tests[0] if len(tests) == 1 else lambda line: _any_of([t(line) for t in tests])

    def _both(self) -> Test:
        tests = [self._one()]
        while self._take("and"):
            tests.append(self._one())
        return lambda line: _not(_any_of([_not(test(line)) for test in tests]))

    def _one(self) -> Test:
        if self._take("not"):
            test = self._one()
            return lambda line: _not(test(line))
        is_number = len(self._words) > 1 and self._words[1] in _BESIDE_NUMBERS
        if self._words[0].startswith("--") and not is_number:
            return self._flag()
        return self._comparison()

    def _flag(self) -> Test:
        option = self._words.pop(0)
        if self.next_word in (None, "or", "and"):
            return lambda line: line.asks(option)
        pattern = self._words.pop(0)
        return lambda line: line.has(option, pattern)

    def _comparison(self) -> Test:
        numbers, signs = [self._sum()], []
        while self.next_word in _COMPARISONS:
            signs.append(_COMPARISONS[self._words.pop(0)])
            numbers.append(self._sum())
        assert signs, "a number is no condition"

        def compare(line: Readable) -> bool:
            found = [number(line) for number in numbers]
            pairs = zip(signs, found[:-1], found[1:], strict=True)
            return all(sign(left, right) for sign, left, right in pairs)

        return compare

    def _sum(self) -> Number:
        terms = [self._product()]
        while self._take("+"):
            terms.append(self._product())
        return lambda line: sum(term(line) for term in terms)

    def _product(self) -> Number:
        left = self._factor()
        while self.next_word in ("*", "%"):
            combine = _times if self._words.pop(0) == "*" else _rest
            left = combine(left, self._factor())
        return left

    def _factor(self) -> Number:
        if not self._take("("):
            word = self._words.pop(0)
            return _literal(float(word)) if word.isdecimal() or "." in word else _of_line(word)
        inner = self._sum()
        if self._take("else"):
            inner = _else(inner, self._sum())
        assert self._take(")"), "a parenthesis stays open"
        return inner

    def _take(self, word: str) -> bool:
        if self.next_word != word:
            return False
        self._words.pop(0)
        return True


def _any_of(truths: Sequence[Truth]) -> Truth:
    if any(truths):
        return True
    return None if None in truths else False


def _not(truth: Truth) -> Truth:
    return None if truth is None else not truth


def _literal(value: float) -> Number:
    return lambda _: value


def _of_line(name: str) -> Number:
    return lambda line: line.number(name)


def _times(left: Number, right: Number) -> Number:
    return lambda line: left(line) * right(line)


def _rest(left: Number, right: Number) -> Number:
    return lambda line: left(line) % (right(line) or 1)


def _else(first: Number, second: Number) -> Number:
    return lambda line: second(line) if math.isnan(first(line)) else first(line)
