"""Reads the command line of a tool: flags, words told by their place, and subcommands.

A tool declares its flags in frozen dataclasses, as training does:

    @dataclass(frozen=True)
    class MergeFlags:
        \"\"\"Files.\"\"\"

        input: tuple[Path, ...] = required("Pairs to merge.", metavar="PREFIX ...")

    flags = read(argv, __doc__, MergeFlags)[MergeFlags]

Help, all mistakes at once and notes follow from the declarations. A flag may be cut short as long
as one flag only begins so.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from megatron.flags.checks import check
from megatron.flags.declare import Declaration
from megatron.flags.groups import Flags, Rule, all_declarations, filled
from megatron.flags.help import help_text, summary
from megatron.flags.words import SortedWords, as_written, no_flag, split


@dataclass(frozen=True)
class Found:
    """A command line that was read.

    Attributes:
        flags: the flags; those with a mistake have their default.
        mistakes: a line on each mistake; it begins with the flag and names the way out.
        notes: a line on each flag that changes nothing; it begins with it.
        others: the flags of another command, with their words.
    """

    flags: Flags
    mistakes: Sequence[str]
    notes: Sequence[str]
    others: Sequence[str]


@dataclass
class _Words(SortedWords):
    """The words of a tool's command line.

    Attributes:
        loose: the words that stand behind no flag.
        unknown: flags that are not declared, each with the words behind it.
    """

    loose: list[str] = field(default_factory=list)
    unknown: list[tuple[str, list[str]]] = field(default_factory=list)


def read(
    argv: Sequence[str] | None,
    about: str | None,
    *groups: type,
    rules: Iterable[Rule] = (),
    speak: bool = True,
) -> Flags:
    """Return the flags of a command line.

    Args:
        argv: its words, without the program; ``None``: those of this process.
        about: what the command does, for its help.
        groups: of its flags.
        rules: yield a line on each mistake that no single flag makes.
        speak: whether notes are printed.

    Raises:
        SystemExit: with 0 after ``--help``, with 2 if there are mistakes, which are printed.
    """
    found = _finish(_own(argv), "[flags]", about, groups, rules)
    for note in found.notes if speak else ():
        print(f"note: {note}", file=sys.stderr)
    return found.flags


def read_command(
    argv: Sequence[str] | None,
    about: str | None,
    commands: Mapping[str, type],
    others_of: str = "",
    rules: Iterable[Rule] = (),
) -> tuple[Any, Sequence[str]]:
    """Return the flags of a command line whose first word is a subcommand.

    Args:
        argv: its words, without the program; ``None``: those of this process.
        about: what the commands do, for their help.
        commands: name of each subcommand to the group of its flags.
        others_of: the subcommand that takes flags of another command too; empty: none does.
        rules: yield a line on each mistake that no single flag makes, for any of the subcommands.

    Returns:
        An instance of the subcommand's group, and the flags of another command, with their words.

    Raises:
        SystemExit: with 0 after ``--help``, with 2 if there are mistakes, which are printed.
    """
    words = _own(argv)
    names = ", ".join(commands)
    if words[:1] in (["-h"], ["--help"]):
        listed = [f"  {name:<14}{summary(group)}" for name, group in commands.items()]
        usage = f"usage: {_program()} COMMAND [flags]"
        _leave("\n".join([usage, "", str(about).strip(), "", "commands:", *listed]))
    if not words:
        _refuse([f"a command is missing: give one of {names}"])
    name = words[0]
    if name not in commands:
        near = get_close_matches(name, commands, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        _refuse([f"{name} is no command: {hint}give one of {names}"])
    group = commands[name]
    usage, own = f"{name} [flags]", f"{summary(group)}."
    found = _finish(words[1:], usage, own, (group,), rules, others=name == others_of)
    for note in found.notes:
        print(f"note: {note}", file=sys.stderr)
    return found.flags[group], found.others


def _finish(
    argv: Sequence[str],
    usage: str,
    about: str | None,
    groups: tuple[type, ...],
    rules: Iterable[Rule],
    *,
    others: bool = False,
) -> Found:
    """Read words, and end the process if they ask for help or make mistakes."""
    if not {"-h", "--help"}.isdisjoint(argv):
        places = [own.option for own in all_declarations(groups).values() if own.facts.place]
        usage = " ".join([_program(), *places, usage])
        _leave(help_text(usage, str(about), groups))
    found = found_in(argv, groups, rules, others=others)
    if found.mistakes:
        _refuse(found.mistakes)
    return found


def found_in(
    argv: Sequence[str],
    groups: tuple[type, ...],
    rules: Iterable[Rule] = (),
    *,
    others: bool = False,
) -> Found:
    """Read a command line, with or without mistakes.

    Args:
        argv: its words, without the program.
        groups: of its flags.
        rules: yield a line on each mistake that no single flag makes.
        others: whether unknown flags are those of another command, and no mistakes.
    """
    declared = all_declarations(groups)
    words = _sorted(argv, declared)
    _put_in_place(words, [own for own in declared.values() if own.facts.place])
    if not others:
        known = [name for own in declared.values() for name in own.names if not own.facts.hidden]
        words.mistakes += [no_flag(option, known) for option, _ in words.unknown]
    flags = filled(groups, words.given)
    told = check(flags, rules, (), words.unreadable)
    left = [word for option, values in words.unknown for word in (option, *values)]
    return Found(
        flags,
        [*words.mistakes, *told.mistakes],
        [*words.notes, *told.notes],
        left if others else (),
    )


def _sorted(argv: Sequence[str], declared: Mapping[str, Declaration]) -> _Words:
    """Sort words by flag; behind a flag stand only those that it takes, if there are places."""
    found = _Words()
    names = {name: own for own in declared.values() for name in own.names}
    has_places = any(own.facts.place for own in declared.values())
    for option, values in split(argv, short=[name for name in names if len(name) == 2]):
        own = _meant(option, names)
        if not option:
            found.loose += values
        elif isinstance(own, str):
            found.mistakes.append(own)
        elif own is None:
            found.unknown.append((option, values))
        else:
            most = len(values) if own.takes_several or not has_places else own.kind is not bool
            found.take(own, values[:most], as_written(own.option, values[:most]))
            found.loose += values[most:]
    return found


def _meant(option: str, names: Mapping[str, Declaration]) -> Declaration | str | None:
    """Return the declaration of a flag, a line if several begin so, ``None`` if none does."""
    if option in names or not option:
        return names.get(option)
    begun = {own.option: own for name, own in names.items() if name.startswith(option)}
    if len(begun) > 1:
        return f"{option} may be {' or '.join(begun)}: write it out"
    return next(iter(begun.values()), None)


def _put_in_place(found: _Words, places: Sequence[Declaration]) -> None:
    """Give the loose words to the places, in order."""
    for own, word in zip(places, found.loose, strict=False):
        found.take(own, [word], as_written(own.option, [word]))
    if any(values for _, values in found.unknown):  # which may be meant for a place
        found.unreadable.update(own.option for own in places[len(found.loose) :])
    if left := found.loose[len(places) :]:
        taken = " ".join(own.option for own in places)
        takes = f"behind {taken}" if places else "before any flag"
        found.mistakes.append(
            f"{' '.join(left)!r} stands {takes}: leave it out, or write its flag first"
        )


def _own(argv: Sequence[str] | None) -> list[str]:
    return sys.argv[1:] if argv is None else list(argv)


def _program() -> str:
    return Path(sys.argv[0]).name


def _leave(text: str) -> NoReturn:
    print(text)
    sys.exit(0)


def _refuse(mistakes: Sequence[str]) -> NoReturn:
    """End the process; several mistakes have a line each."""
    lines = "\n".join(mistakes)
    print(f"error:{chr(10) if len(mistakes) > 1 else ' '}{lines}", file=sys.stderr)
    sys.exit(2)
