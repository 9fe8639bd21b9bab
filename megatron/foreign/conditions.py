"""Judges [ ... ], [[ ... ]], test and ((...)): true, false, or not known to a reader."""

import re
from collections.abc import Callable
from typing import Final, TypeAlias

from megatron.foreign.expand import Expander
from megatron.foreign.patterns import matches
from megatron.foreign.tokens import Word
from megatron.foreign.values import HOLE

TESTS: Final = frozenset({"[", "[[", "test", "(("})
"""Commands that are tests."""

_NUMBERS: Final[dict[str, Callable[[int, int], bool]]] = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
}
_NUMBER: Final = re.compile(r"\s*-?(0|[1-9]\d{0,17})\s*", re.ASCII)
_ALIKE: Final = ("=", "==", "!=")
_OF_FILES: Final = ("-e", "-f", "-r", "-s")

IsThere: TypeAlias = Callable[[str], bool]


def is_test(words: tuple[Word, ...]) -> bool:
    """Return whether a command is a test, perhaps behind !."""
    own = [word for word in words if word.plain != "!"]
    return bool(own) and _name(own[0]) in TESTS


def _name(word: Word) -> str | None:
    return "((" if word.source.startswith("((") else word.plain


def judged(words: tuple[Word, ...], expander: Expander, is_there: IsThere) -> bool | None:
    """Return whether a test holds; ``None``: it is not known.

    Args:
        words: a command for which ``is_test`` holds.
        expander: replaces variables.
        is_there: tells whether a file is one that the reader can read.
    """
    test = [word for word in words if word.plain != "!" or word is not words[0]]
    own = _judged(test, expander, is_there)
    return _not(own) if test[0] is not words[0] else own


def _judged(words: list[Word], expander: Expander, is_there: IsThere) -> bool | None:
    name = _name(words[0])
    if name == "((":
        return expander.condition(words[0].pieces[-1].text, words[0].line)
    close = {"[": "]", "[[": "]]"}.get(name or "")
    inside = words[1:-1] if close and words[-1].plain == close else words[1:]
    try:
        return _Test(inside, expander, is_there).result()
    except (IndexError, RecursionError):
        return None


def _not(value: bool | None) -> bool | None:
    return None if value is None else not value


class _Test:
    """Reads the words of a test from the first to the last."""

    def __init__(self, words: list[Word], expander: Expander, is_there: IsThere) -> None:
        self._words, self._expander, self._at = words, expander, 0
        self._is_there = is_there

    def result(self) -> bool | None:
        """Return whether the test holds."""
        if not self._words:
            return False
        found = self._either()
        return found if self._at == len(self._words) else None

    def _plain(self, ahead: int = 0) -> str:
        place = self._at + ahead
        return (self._words[place].plain or "") if place < len(self._words) else ""

    def _either(self) -> bool | None:
        found = self._both()
        while self._plain() in ("-o", "||"):
            self._at += 1
            other = self._both()
            found = True if found or other else None if None in (found, other) else False
        return found

    def _both(self) -> bool | None:
        found = self._one()
        while self._plain() in ("-a", "&&"):
            self._at += 1
            other = self._one()
            found = False if False in (found, other) else None if None in (found, other) else True
        return found

    def _one(self) -> bool | None:
        if self._plain() == "!":
            self._at += 1
            return _not(self._one())
        if self._plain() in ("(", "\\("):
            self._at += 1
            found = self._either()
            self._at += 1
            return found
        if self._plain(1) in (*_NUMBERS, *_ALIKE, "=~", "<", ">"):
            left, operator, right = self._words[self._at], self._plain(1), self._words[self._at + 2]
            self._at += 3
            return self._compared(self._text(left), operator, right)
        if re.fullmatch(r"-[a-zA-Z]", self._plain()) and self._at + 1 < len(self._words):
            operator, word = self._plain(), self._words[self._at + 1]
            self._at += 2
            return self._unary(operator, word)
        self._at += 1
        text = self._text(self._words[self._at - 1])
        return None if HOLE.fullmatch(text) else text != ""

    def _text(self, word: Word) -> str:
        return self._expander.text(word, is_test=True)

    def _unary(self, operator: str, word: Word) -> bool | None:
        text = self._text(word)
        if operator in ("-z", "-n"):
            if HOLE.search(text):
                only_holes = HOLE.sub("", text) == ""
                return None if only_holes else operator == "-n"
            return (text == "") == (operator == "-z")
        if operator == "-v":
            return self._expander.scope.get(text) is not None
        # A file that is missing here may be there where the script runs.
        return True if operator in _OF_FILES and self._is_there(text) else None

    def _compared(self, left: str, operator: str, other: Word) -> bool | None:
        right = self._text(other)
        if HOLE.search(left) or HOLE.search(right):
            return None
        if operator in _NUMBERS:
            if not (left.strip() and right.strip()):
                return False  # the shell says so and goes on with the other branch
            if not (_NUMBER.fullmatch(left) and _NUMBER.fullmatch(right)):
                return None  # [[ computes it, and [ does not
            return _NUMBERS[operator](int(left), int(right))
        if operator not in _ALIKE:
            return None
        is_pattern = set(other.plain or "") & set("*?[")
        alike = matches(left, right) if is_pattern else left == right
        return _not(alike) if operator == "!=" else alike
