"""Finds all mistakes of a command line at once, and all flags that change nothing.

First the declarations of flags judge the values, each alone and with the others. Then come the
rules: functions that judge several flags together. If a rule reads a value that is itself a
mistake, the rule stops silently. Each mistake is therefore reported only once.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass
from fnmatch import fnmatchcase
from typing import Any, NoReturn

from megatron.flags.conditions import alternatives, holds
from megatron.flags.declare import Declaration, Facts
from megatron.flags.groups import Flags, all_declarations, declarations
from megatron.flags.ranges import LARGEST
from megatron.flags.rules import FoundRule


@dataclass(frozen=True)
class Findings:
    """The mistakes of a command line, and its notes.

    Attributes:
        mistakes: a line on each mistake. The line begins with the flag and names the way out.
        notes: a line on each flag that changes nothing together with the others.
    """

    mistakes: list[str]
    notes: list[str]


def check(flags: Flags, rules: Iterable[FoundRule], unreadable: Collection[str] = ()) -> Findings:
    """Find all mistakes that make a run impossible, and all flags that change nothing.

    Args:
        flags: as given, before defaults are resolved. A required flag that is missing is ``None``.
        rules: all rules that hold for the run.
        unreadable: flags that have their defaults only because their words could not be read, or
            because a refused flag would decide their values.
    """
    declared = all_declarations(tuple(flags.groups))
    given = {
        own.name: getattr(group, own.name)
        for kind, group in flags.groups.items()
        for own in declarations(kind)
    }
    values = {
        option: own.flag_value(given[own.name])
        for option, own in declared.items()
        if option not in unreadable
    }
    told = dict(value_mistakes(declared, values))
    sound_values = {option: value for option, value in values.items() if option not in told}
    sound = _without(flags, {declared[option].name for option in (*unreadable, *told)})
    mistakes = [*told.values(), *pairing_mistakes(declared, sound_values)]
    notes = [*idle_notes(declared, sound_values)]
    found: dict[str, list[str]] = {"mistakes": [], "notes": []}
    for rule in rules:
        with suppress(_FaultyValueError):
            found[rule.finds].extend(rule(sound))
    by_flag = _places(declared)
    mistakes += sorted(found["mistakes"], key=by_flag)
    notes += sorted(found["notes"], key=by_flag)
    return Findings(mistakes, notes)


def _places(declared: Mapping[str, Declaration]) -> Callable[[str], int]:
    """Return the function from a rule's line to the place of the line's flag in the help.

    So the order of lines does not depend on the files in which rules stand.
    """
    places = {option: place for place, option in enumerate(declared)}
    return lambda line: places.get(line.split(maxsplit=1)[0].rstrip(":,"), len(places))


class _FaultyValueError(Exception):
    """A rule reads a value that is a mistake itself."""


def _without(flags: Flags, faulty: Collection[str]) -> Flags:
    """Return the flags with groups in which values that are mistakes cannot be read."""
    groups = {
        kind: _sound(group, {own.name for own in declarations(kind)} & set(faulty))
        for kind, group in flags.groups.items()
    }
    return Flags(groups, flags.world_size)


def _sound(group: Any, faulty: Collection[str]) -> Any:
    """Return an equal group of a class in which the properties of faulty values raise."""
    if not faulty:
        return group

    def unreadable(self: object, *_: object) -> NoReturn:
        raise _FaultyValueError

    kind, guard = type(group), property(unreadable, unreadable)  # a changed copy raises too
    guarded = type(kind.__name__, (kind,), dict.fromkeys(faulty, guard))
    made: Any = object.__new__(guarded)
    vars(made).update(vars(group))
    return made


@dataclass(frozen=True)
class _Values:
    """The values of flags, in the form that conditions read.

    Attributes:
        by_option: value of each flag, without the values that are mistakes; ``None``: the flag is
            not given.
        declared: all flags.
    """

    by_option: Mapping[str, object]
    declared: Mapping[str, Declaration]

    def asks(self, option: str) -> bool | None:
        if option not in self.by_option:
            return None
        value, reads = self.by_option[option], self.declared[option].facts.reads
        if reads is not None:  # words such as 0,0 may make a 0, which asks for something
            return value is not None
        return bool(value)

    def has(self, option: str, pattern: str) -> bool | None:
        if option not in self.by_option:
            return None
        return fnmatchcase(str(self.by_option[option]), pattern)

    def number(self, name: str) -> float:
        value = self.by_option.get(name)
        return value if isinstance(value, (int, float)) else math.nan


def value_mistakes(
    declared: Mapping[str, Declaration], values: Mapping[str, object]
) -> Iterator[tuple[str, str]]:
    """Yield each flag whose value is missing or out of range, with a line on the mistake."""
    for option, value in values.items():
        declaration, allowed = declared[option], declared[option].facts.range
        if value is None and declaration.default is MISSING:
            yield option, f"{option} is missing: {declaration.facts.help}"
        if allowed and not all(map(allowed.contains, _numbers_in(value))):
            yield option, f"{declaration.shown(value)}: must be {allowed.words}"


def _numbers_in(value: object) -> list[float]:
    """Return the numbers of a flag's value: the value itself, those of a tuple, those in words."""
    if isinstance(value, tuple):
        return [number for part in value for number in _numbers_in(part)]
    if isinstance(value, str):
        most = len(str(LARGEST)) + 1  # of more digits Python may refuse to make a number
        found = (digits.lstrip("0") for digits in re.findall(r"[0-9]+", value))
        return [int(digits[:most] or "0") for digits in found]
    return [value] if isinstance(value, (int, float)) else []


def pairing_mistakes(
    declared: Mapping[str, Declaration], values: Mapping[str, object]
) -> Iterator[str]:
    """Yield a line on each flag that lacks a needed flag, or is given with an excluded flag."""
    line = _Values(values, declared)
    for given, facts in _asking(declared, values):
        if facts.needs and holds(facts.needs, line) is False:
            yield f"{given} {facts.lack}: add {facts.needs}, or leave it out"
        for condition in alternatives(facts.excludes):
            if holds(condition, line):
                other = condition.split()[0]
                yield (
                    f"{given} does not go with {declared[other].shown(values[other])}: give one of "
                    "them and leave the other out"
                )


def idle_notes(declared: Mapping[str, Declaration], values: Mapping[str, object]) -> Iterator[str]:
    """Yield a line on each flag that changes nothing with the others, as in Megatron."""
    line = _Values(values, declared)
    for given, facts in _asking(declared, values):
        if facts.idle_without and holds(facts.idle_without, line) is False:
            yield f"{given} changes nothing without {facts.idle_without}"
        for condition in alternatives(facts.idle_with):
            if holds(condition, line):
                yield f"{given} changes nothing with {condition}"


def is_idle(
    own: Declaration, declared: Mapping[str, Declaration], values: Mapping[str, object]
) -> bool:
    """Return whether a flag changes nothing with the values of other flags, by option."""
    line, facts = _Values(values, declared), own.facts
    without = bool(facts.idle_without) and holds(facts.idle_without, line) is False
    return without or any(holds(one, line) for one in alternatives(facts.idle_with))


def _asking(
    declared: Mapping[str, Declaration], values: Mapping[str, object]
) -> Iterator[tuple[str, Facts]]:
    """Yield every flag that asks for something, as the user gave it, with the facts about it."""
    for option, value in values.items():
        declaration = declared[option]
        if declaration.asks(value):
            yield declaration.shown(value), declaration.facts
