"""Finds all mistakes of a command line at once, and all flags that change nothing.

If a rule reads a value that is itself a mistake, the rule stops silently. Each mistake is therefore
reported only once.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NoReturn

from megatron.config.declare import Flags, Rule
from megatron.config.flags import DECLARED, LogFlags
from megatron.config.job_rules import job_notes, job_rules
from megatron.config.pairing import idle_notes, pairing_mistakes, value_mistakes
from megatron.config.rules import NOTES, RULES


@dataclass(frozen=True)
class Findings:
    """What is to be said about flags.

    Attributes:
        mistakes: a line on each mistake; it begins with the flag and names the way out.
        notes: a line on each flag that changes nothing beside the others.
    """

    mistakes: list[str]
    notes: list[str]


def check(flags: Flags, world_size: int, unreadable: Collection[str] = ()) -> Findings:
    """Find all mistakes that make a run impossible, and all flags that change nothing.

    Args:
        flags: as given, defaults not yet resolved; ``None`` where a required one is missing.
        world_size: ranks of the job.
        unreadable: flags that have their default only because what decides them could not be read.
    """
    declared = DECLARED
    given = {name: value for group in flags.groups.values() for name, value in vars(group).items()}
    values = {option: given[d.name] for option, d in declared.items() if option not in unreadable}
    told = dict(value_mistakes(declared, values))
    sound_values = {option: value for option, value in values.items() if option not in told}
    sound = _without(flags, {declared[option].name for option in (*unreadable, *told)})
    dry_run = flags[LogFlags].dry_run
    mistakes = [*told.values(), *pairing_mistakes(declared, sound_values)]
    mistakes += _lines((*RULES, *job_rules(world_size, dry_run)), sound)
    notes = [
        *idle_notes(declared, sound_values),
        *_lines((*NOTES, *job_notes(world_size, dry_run)), sound),
    ]
    return Findings(mistakes, notes)


def _lines(rules: Iterable[Rule], flags: Flags) -> list[str]:
    lines: list[str] = []
    for rule in rules:
        try:
            lines.extend(rule(flags))
        except _FaultyValueError:
            continue
    return lines


class _FaultyValueError(Exception):
    """A rule reads a value that is a mistake itself."""


class _Sound(SimpleNamespace):
    """A group of flags without the values that are mistakes.

    Args:
        values: of its flags, by name.
        faulty: names of those whose values are mistakes.
    """

    def __init__(self, values: Mapping[str, object], faulty: Collection[str]) -> None:
        super().__init__(**{name: value for name, value in values.items() if name not in faulty})
        self._faulty = values.keys() & faulty

    def __getattr__(self, name: str) -> NoReturn:
        if name in self._faulty:
            raise _FaultyValueError(name)
        raise AttributeError(f"no flag of this group is named {name}")


def _without(flags: Flags, faulty: Collection[str]) -> Flags:
    return Flags({kind: _Sound(vars(group), faulty) for kind, group in flags.groups.items()})
