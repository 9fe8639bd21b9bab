"""The word ``auto`` in the place of a number, which leaves the number to the plan of a run."""

from typing import Final


class _Auto(int):
    """A number that is shown as the word ``auto``."""

    def __str__(self) -> str:
        return "auto"


AUTO: Final = _Auto(0)
"""Stands for the word ``auto``, for a flag whose value is a number above 0."""

_DIGITS: Final = 9
"""Digits of the longest such number; a longer number is mistyped."""


def number_or_auto(word: str) -> int:
    """Read a whole number above 0, or the word ``auto``.

    Raises:
        ValueError: the word is neither of them.
    """
    if word == "auto":
        return AUTO
    if not (word.isascii() and word.isdecimal() and len(word) <= _DIGITS and int(word) > 0):
        raise ValueError("give auto, or a whole number, at least 1")
    return int(word)
