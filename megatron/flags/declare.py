"""Declares flags: one declaration holds every fact about a single flag.

A group of flags is a frozen dataclass, and each field is a flag with a name and a type. ``flag`` or
``required`` adds the default, the meaning, the allowed values, and the flags that the flag needs or
excludes. Help, parsing, checks and the page of all flags follow from these declarations.

``megatron.flags.conditions`` tells how to write a condition, for instance in ``needs``.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import (
    Any,
    Literal,
    TypeVar,
    get_args,
    get_origin,
)

from megatron.flags.ranges import DIGITS, Range
from megatron.flags.readable import nearest

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Facts:
    """Facts about a flag besides its name, type and default.

    Attributes:
        help: the flag's meaning, in a sentence or two.
        range: the numbers that the flag may take. If its words hold several whole numbers, as in
            0:8, each of them.
        unset: in words, the value of a flag without a default if the flag is not given.
        metavar: the form of its values; by default the form of its type.
        choices: the words that the flag may be set to, if its type does not list them.
        any_case: whether capitals and small letters are alike in these words.
        instead: advice for a user whose word is not among the choices.
        needs: the condition without which the flag would do nothing.
        lack: the fault if that condition does not hold; it stands behind the flag in a message.
        excludes: conditions that contradict the flag.
        idle_without: the condition without which the flag changes nothing, as in Megatron.
        idle_with: conditions under which the flag changes nothing, as in Megatron.
        names: other names of the flag on a tool's command line, such as ``-p``. Other names that
            training knows stand in ``run/foreign``.
        place: name in the help, for a word that has no flag and is told by its place.
        reads: function from a word to its value; by default the type. For a wrong word it raises a
            ``ValueError`` that names the way out.
        writes: function from a value to its word, the inverse of ``reads``; by default ``str``.
        is_told_if_derived: whether a value is written out that would be derived anyway.
        repeats: whether the flag takes one word and may be given several times. It then has a value
            for each time.
        may_be_empty: whether a flag of several words may be given without a word.
        hidden: whether only the tool itself gives the flag; no help lists it.
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
    names: tuple[str, ...] = ()
    place: str = ""
    reads: Callable[[str], Any] | None = None
    writes: Callable[[Any], str] = str
    is_told_if_derived: bool = True
    repeats: bool = False
    may_be_empty: bool = False
    hidden: bool = False


def flag(default: T, help: str, range: Range | None = None, **facts: Any) -> T:
    """Declare a flag that may be left out; ``facts`` are further arguments of ``Facts``."""
    return dataclasses.field(default=default, metadata={"facts": Facts(help, range, **facts)})


def required(help: str, range: Range | None = None, **facts: Any) -> Any:
    """Declare a flag that must be given; ``facts`` are further arguments of ``Facts``."""
    return dataclasses.field(metadata={"facts": Facts(help, range, **facts)})


def derived(help: str, range: Range | None = None, *, unset: str, **facts: Any) -> Any:
    """Declare a flag whose value follows from other values if the flag is not given.

    The field has the type of the final value. On a command line that was only read it is ``None``,
    until the tree of settings is completed.

    Args:
        help: as in ``Facts``.
        range: as in ``Facts``.
        unset: the derived value in words.
        facts: further arguments of ``Facts``.
    """
    own = Facts(help, range, unset=unset, **facts)
    return dataclasses.field(default=None, metadata={"facts": own, "derived": True})


@dataclasses.dataclass(frozen=True)
class Spelling:
    """A flag without a value that gives its field one certain value.

    Attributes:
        option: the flag as it stands on a command line.
        value: value of the field if the flag is given.
        facts: facts about the flag.
    """

    option: str
    value: Any
    facts: Facts


def spells(option: str, value: Any, help: str, **facts: Any) -> Spelling:
    """Return a spelling; ``facts`` are further arguments of ``Facts``."""
    return Spelling(option, value, Facts(help, **facts))


def spelled(default: T, *spellings: Spelling) -> T:
    """Declare a field with a flag of its own for every value but the default.

    At most one of these flags may be given.
    """
    return dataclasses.field(default=default, metadata={"spellings": spellings})


def positional(help: str, metavar: str, **facts: Any) -> Any:
    """Declare a word that is told by its place; ``metavar`` is its name, in capitals.

    Only the last of these words may be one that ``repeats``.
    """
    return required(help, place=metavar, metavar=metavar, **facts)


def option_of(name: str) -> str:
    """The flag for the name of a field, as it stands on a command line."""
    return "--" + name.replace("_", "-")


@dataclasses.dataclass(frozen=True)
class Declaration:
    """A flag as it is declared in its group.

    Attributes:
        name: name of its field.
        kind: type of its values: ``bool``, ``int``, ``float``, ``str``, ``Path``, a ``Literal``, or
            a tuple of any number of one of these. With ``Facts.reads`` it may be any other type.
        default: value of the flag if it is not given; ``MISSING`` if it must be given.
        facts: all other facts.
        spelling: the value that the flag gives its field; ``None``: the field has the flag's value.
        is_derived: whether the value follows from other values if the flag is not given.
    """

    name: str
    kind: Any
    default: object
    facts: Facts
    spelling: Spelling | None = None
    is_derived: bool = False

    @property
    def option(self) -> str:
        """The flag as it stands on a command line; for a word without a flag, ``Facts.place``."""
        own = option_of(self.name) if self.spelling is None else self.spelling.option
        return self.facts.place or own

    def flag_value(self, field_value: Any) -> Any:
        """Return the value of the flag with which its field has a value."""
        return field_value if self.spelling is None else field_value == self.spelling.value

    def field_value(self, flag_value: Any) -> Any:
        """Return the value that a given flag gives its field."""
        return flag_value if self.spelling is None else self.spelling.value

    def words(self, flag_value: Any) -> list[str]:
        """Return the words behind the flag that make a value."""
        if flag_value is True:
            return []
        several = isinstance(flag_value, tuple) and get_origin(self.kind) is tuple
        return [self.facts.writes(value) for value in (flag_value if several else (flag_value,))]

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the flag on a command line, the documented name first."""
        return () if self.facts.place else (self.option, *self.facts.names)

    @property
    def takes_several(self) -> bool:
        """Whether any number of words may stand behind the flag."""
        return get_origin(self.kind) is tuple and not self.facts.repeats

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that the flag may be set to; empty if any word is allowed."""
        listed = get_origin(self._element) is Literal
        return get_args(self._element) if listed else self.facts.choices

    @property
    def metavar(self) -> str:
        """The form of its values, as help shows it."""
        if self.facts.metavar or self.kind is bool:
            return self.facts.metavar
        kind = {int: "INT", float: "FLOAT", Path: "PATH"}.get(self._element, "STR")
        if self.choices:
            kind = "{" + ",".join(self.choices) + "}"
        return f"{kind} ..." if self.takes_several else kind

    @property
    def default_words(self) -> str:
        """The default in words: ``Facts.unset`` if it is given, or the value itself."""
        if self.default is dataclasses.MISSING:
            return "required"
        if self.facts.unset:
            return self.facts.unset
        words = ["off"] if self.default is False else self.words(self.default)
        return " ".join(words) or "none"

    def shown(self, value: object) -> str:
        """The flag with a value, as it stands on a command line."""
        return " ".join([self.option, *self.words(value)]).rstrip()

    def asks(self, value: object) -> bool:
        """Whether a value asks for something. The default does not, and neither does 0.

        If the default is ``None``, 0 asks for something.
        """
        return value != self.default and not (value == 0 and self.default is not None)

    def unreadable(self, words: Sequence[str]) -> str | None:
        """Return the fault in the words behind the flag; ``None`` if they make a value."""
        given = " ".join([self.option, *words])
        if self.kind is bool:
            return f"{self.option} takes no value, got {' '.join(words)!r}" if words else None
        if any("\0" in word for word in words):
            return f"{self.option}: there is a zero byte in {words!r}; leave it out"
        if not all(words) and self.facts.reads is None:
            return f"{self.option}: a word behind it is empty; give {self.metavar}, or leave it out"
        if dashed := self._dashed(words):
            return f"{given}: no value begins with '-'; a file of this name is ./{dashed}"
        if self.takes_several and not words and not self.facts.may_be_empty:
            return f"{given}: nothing stands behind it; give {self.metavar}"
        if not self.takes_several and len(words) != 1:
            return f"{given}: takes one value, {self.metavar}, got {len(words)}"
        return next((fault for word in words if (fault := self._no_value(word))), None)

    def _no_value(self, word: str) -> str | None:
        """Return the fault in one word; ``None`` if it makes a value."""
        if self.facts.reads is not None:
            try:
                self.facts.reads(word)
            except ValueError as error:
                return f"{self.option} {cut(word)}: {error}"
            return None
        if self.choices and not self._is_choice(word):
            instead = f"; {self.facts.instead}" if self.facts.instead else ""
            near = nearest(word, self.choices)
            return f"{self.option} {word}: {near}choose one of {', '.join(self.choices)}{instead}"
        return self._no_number(word)

    def value(self, words: Sequence[str]) -> Any:
        """Return the value that faultless words behind the flag make."""
        if self.kind is bool:
            return True
        make = self.facts.reads or (str if get_origin(self._element) is Literal else self._element)
        made = tuple(map(make, words))
        return made if get_origin(self.kind) is tuple else made[0]

    @property
    def _element(self) -> Any:
        """The type of a single word behind the flag."""
        return get_args(self.kind)[0] if get_origin(self.kind) is tuple else self.kind

    def _no_number(self, word: str) -> str | None:
        """Return the fault in a word that should be a number; ``None`` if there is none."""
        if self._element not in (int, float):
            return None
        whole = "whole " if self._element is int else ""
        try:
            value = self._element(word)
        except ValueError:
            return f"{self.option} {cut(word)}: must be a {whole}number"
        if whole and abs(value) >= 10**DIGITS:
            return f"{self.option} {cut(word)}: must be a number of at most {DIGITS} digits"
        return None

    def _is_choice(self, word: str) -> bool:
        if self.facts.any_case:
            return word.lower() in {choice.lower() for choice in self.choices}
        return word in self.choices

    def _dashed(self, words: Sequence[str]) -> str | None:
        """Return the first word that looks like a flag; a negative number does not."""
        if self.choices or self.facts.reads or self._element in (int, float):
            return None
        dashed = (word for word in words if word.startswith("-"))
        weights = get_origin(self.kind) is tuple  # a rule of such a flag judges negative weights
        return next((word for word in dashed if not (weights and is_number(word))), None)


def cut(word: str, most: int = 40) -> str:
    """Return a word; if it has more than ``most`` characters, its beginning and three dots."""
    return word if len(word) <= most else f"{word[:most]}..."


def is_number(word: str) -> bool:
    """Return whether a word is a number."""
    try:
        float(word)
    except ValueError:
        return False
    return True
