"""Declares flags: one declaration holds every fact about a single flag.

A group of flags is a frozen dataclass, and each field is a flag with a name and a type. ``flag`` or
``required`` adds its default, its meaning, its allowed values, and the flags that it needs or
excludes. Help, parsing, checks and the page of all flags follow from these declarations.

``conditions`` tells how conditions are written, as in ``needs`` and ``excludes``.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import (
    Any,
    Literal,
    TypeVar,
    get_args,
    get_origin,
)

from megatron.simulator.costs.redistribute import MOST_LAYERS

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Range:
    """Numbers that a flag may take; NaN is in no range.

    Attributes:
        words: the range in words, to follow "must be".
        contains: whether a number lies in it.
    """

    words: str
    contains: Callable[[float], bool]


def up_to(most: int) -> Range:
    """Return the range of a size: one that is above ``most`` is a mistyped number."""
    return Range(f"at least 1 and at most {most:,}", lambda x: 1 <= x <= most)


COUNT = Range("at least 1 and finite", lambda x: 1 <= x < math.inf)
POSITIVE = Range("greater than 0 and finite", lambda x: 0 < x < math.inf)
NOT_NEGATIVE = Range("at least 0 and finite", lambda x: 0 <= x < math.inf)
SHARE = Range("at least 0 and below 1", lambda x: 0 <= x < 1)
PERCENT = Range("greater than 0 and at most 1", lambda x: 0 < x <= 1)

WIDTH = up_to(1 << 24)
LENGTH = up_to(1 << 30)
DEPTH = up_to(MOST_LAYERS)
RANKS = up_to(1 << 16)
MINUTES = up_to(366 * 24 * 60)
SEED = Range("at least 0 and below 2**32", lambda x: 0 <= x < 1 << 32)

_DIGITS = 18
"""Digits of the longest whole number that a flag may have; it fits into 64 bits."""


@dataclasses.dataclass(frozen=True)
class Facts:
    """Facts about a flag besides its name, type and default.

    Attributes:
        help: the flag's meaning, in a sentence or two.
        range: the numbers it may take.
        unset: the value that a flag without a default has if it is not given, in words.
        metavar: the form of its values; by default the form of its type.
        choices: the words it may be set to, if its type does not list them.
        any_case: whether capitals and small letters are alike in these words.
        instead: advice for a user whose word is none of the choices.
        needs: the condition without which the flag would do nothing.
        lack: the fault if that condition does not hold, to follow the flag.
        excludes: conditions that contradict the flag.
        idle_without: the condition without which the flag changes nothing, as in Megatron.
        idle_with: conditions under which it changes nothing, as in Megatron.
    """

    help: str
    range: Range | None = None
    _: dataclasses.KW_ONLY
    unset: str = ""
    metavar: str = ""
    choices: tuple[str, ...] = ()
    any_case: bool = False
    instead: str = ""
    needs: str = ""
    lack: str = "has no effect by itself"
    excludes: str = ""
    idle_without: str = ""
    idle_with: str = ""


def flag(default: T, help: str, range: Range | None = None, **facts: Any) -> T:
    """Declare a flag that may be left out; ``facts`` are further arguments of ``Facts``."""
    return dataclasses.field(default=default, metadata={"facts": Facts(help, range, **facts)})


def required(help: str, range: Range | None = None, **facts: Any) -> Any:
    """Declare a flag that must be given; ``facts`` are further arguments of ``Facts``."""
    return dataclasses.field(metadata={"facts": Facts(help, range, **facts)})


def option_of(name: str) -> str:
    """The flag of a field's name, as it stands on a command line."""
    return "--" + name.replace("_", "-")


@dataclasses.dataclass(frozen=True)
class Declaration:
    """A flag as it is declared in its group.

    Attributes:
        name: name of the field.
        kind: type of its values: ``bool``, ``int``, ``float``, ``str``, ``Path``, a ``Literal``, or
            a tuple of any number of one of these.
        default: its value if it is not given; ``MISSING`` if it must be given.
        facts: all other facts.
    """

    name: str
    kind: Any
    default: object
    facts: Facts

    @property
    def option(self) -> str:
        """The flag as it stands on a command line."""
        return option_of(self.name)

    @property
    def choices(self) -> tuple[str, ...]:
        """The words it may be set to; empty if any word is allowed."""
        return get_args(self.kind) if get_origin(self.kind) is Literal else self.facts.choices

    @property
    def metavar(self) -> str:
        """The form of its values."""
        if self.facts.metavar or self.kind is bool:
            return self.facts.metavar
        if self.choices:
            return "{" + ",".join(self.choices) + "}"
        return {int: "INT", float: "FLOAT", Path: "PATH"}.get(self.kind, "STR")

    @property
    def default_words(self) -> str:
        """Its default in words; ``Facts.unset`` if it has none."""
        if self.default is dataclasses.MISSING:
            return "required"
        return self.facts.unset or ("off" if self.default is False else str(self.default))

    def shown(self, value: object) -> str:
        """The flag with a value, as it stands on a command line."""
        words = " ".join(map(str, value)) if isinstance(value, tuple) else value
        return self.option if value is True else f"{self.option} {words}"

    def asks(self, value: object) -> bool:
        """Whether a value asks for something: it is neither the default nor a 0 in its place."""
        return value != self.default and not (value == 0 and self.default is not None)

    def unreadable(self, words: Sequence[str]) -> str | None:
        """Return the fault of the words behind the flag; ``None`` if they make a value."""
        given = " ".join([self.option, *words])
        if self.kind is bool:
            return f"{self.option} takes no value, got {' '.join(words)!r}" if words else None
        if any("\0" in word for word in words):
            return f"{self.option}: there is a zero byte in {words!r}; leave it out"
        if not all(words):
            return f"{self.option}: a word behind it is empty; give {self.metavar}, or leave it out"
        if dashed := self._dashed(words):
            return f"{given}: no value begins with '-'; a file of this name is ./{dashed}"
        if get_origin(self.kind) is tuple:
            faults = [fault for word in words if (fault := self._no_number(word))]
            nothing = f"{given}: nothing stands behind it; give {self.metavar}"
            return next(iter(faults), None) if words else nothing
        if len(words) != 1:
            return f"{given}: takes one value, {self.metavar}, got {len(words)}"
        if self.choices and not self._is_choice(words[0]):
            instead = f"; {self.facts.instead}" if self.facts.instead else ""
            return f"{given}: choose one of {', '.join(self.choices)}{instead}"
        return self._no_number(words[0])

    def value(self, words: Sequence[str]) -> Any:
        """Return the value of the words behind the flag, in which there is no fault."""
        if self.kind is bool:
            return True
        if get_origin(self.kind) is tuple:
            return tuple(map(self._element, words))
        return words[0] if get_origin(self.kind) is Literal else self.kind(words[0])

    @property
    def _element(self) -> Any:
        """Type of one of its words."""
        return get_args(self.kind)[0] if get_origin(self.kind) is tuple else self.kind

    def _no_number(self, word: str) -> str | None:
        """Return the fault of the word of a flag for a number; ``None`` if it is one."""
        if self._element not in (int, float):
            return None
        whole = "whole " if self._element is int else ""
        try:
            value = self._element(word)
        except ValueError:
            return f"{self.option} {cut(word)}: must be a {whole}number"
        if whole and abs(value) >= 10**_DIGITS:
            return f"{self.option} {cut(word)}: must be a number of at most {_DIGITS} digits"
        return None

    def _is_choice(self, word: str) -> bool:
        if self.facts.any_case:
            return word.lower() in {choice.lower() for choice in self.choices}
        return word in self.choices

    def _dashed(self, words: Sequence[str]) -> str | None:
        """The first word that looks like a flag; numbers may be negative."""
        if self.choices or self._element in (int, float):
            return None
        dashed = (word for word in words if word.startswith("-"))
        weights = get_origin(self.kind) is tuple  # the rule about their grammar judges those
        return next((word for word in dashed if not (weights and is_number(word))), None)


def cut(word: str, most: int = 40) -> str:
    """Return a word, or its beginning if it has more characters than ``most``."""
    return word if len(word) <= most else f"{word[:most]}..."


def is_number(word: str) -> bool:
    """Return whether a word is a number."""
    try:
        float(word)
    except ValueError:
        return False
    return True
