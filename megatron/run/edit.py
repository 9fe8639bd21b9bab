"""Edits of a command line: another run like this one."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple


class Edit(NamedTuple):
    """A flag of another run like this one.

    Attributes:
        option: the flag, as it stands on a command line.
        values: the words behind it; ``None``: the other run has no such flag.
    """

    option: str
    values: tuple[str, ...] | None = ()

    @property
    def words(self) -> tuple[str, ...]:
        """The words that ask for the edit on a command line; none if it leaves the flag out."""
        return () if self.values is None else (self.option, *self.values)


Choice = tuple[Edit, ...]
"""One of the ways that a property of a run can go: the edits that ask for it."""


def set_to(option: str, *values: object) -> Edit:
    """Return the edit that gives a flag its values."""
    return Edit(option, tuple(map(str, values)))


def left_out(option: str) -> Edit:
    """Return the edit that leaves a flag out."""
    return Edit(option, None)


def edited(given: Mapping[str, Sequence[str]], edits: Iterable[Edit]) -> dict[str, tuple[str, ...]]:
    """Return the words behind each flag of a command line after some edits."""
    found = {option: tuple(values) for option, values in given.items()}
    for edit in edits:
        if edit.values is None:
            found.pop(edit.option, None)
        else:
            found[edit.option] = edit.values
    return found


def in_words(edits: Iterable[Edit]) -> str:
    """Return the flags that edits ask for, as they stand on a command line."""
    return " ".join(word for edit in edits for word in edit.words)
