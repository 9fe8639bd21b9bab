"""What a user leaves to the plan of a run with the word ``auto``: a dimension, and its choices.

Every topic declares its own dimensions; ``choices`` lists them all.
"""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from megatron.flags.groups import Flags
from megatron.run.edit import Choice, in_words


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


class NamedChoice(NamedTuple):
    """One of the ways that a run could go in a dimension.

    Attributes:
        edits: the edits that ask for it on a command line.
        nothing: words that say that nothing is asked for; empty: the edits say it.
    """

    edits: Choice
    nothing: str = ""

    @property
    def words(self) -> str:
        """The flags that ask for it by name, or words that say that nothing is asked for."""
        return self.nothing or in_words(self.edits)


class Dimension(NamedTuple):
    """A property of a run that its plan may choose.

    Attributes:
        flag: the flag with the word that leaves the property to the plan.
        is_open: whether flags leave it to the plan.
        choices: returns its choices that go with the other flags. A run takes the first where
            nothing can compare them.
        closed: returns the reason why there is only one choice, if there is only one.
        by_flops: whether FLOPs tell which choice is best. Otherwise that takes the seconds and the
            memory of a known GPU.
    """

    flag: str
    is_open: Callable[[Flags], bool]
    choices: Callable[[Flags], Sequence[NamedChoice]]
    closed: Callable[[Flags], str] = lambda flags: "nothing else goes with the other flags"
    by_flops: bool = False
