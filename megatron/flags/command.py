"""Reads the command line of a tool: flags, words without a flag, and subcommands.

A word without a flag gets its meaning from its place, as the two files of ``cp`` do.

A tool declares its flags in frozen dataclasses, as training does:

    @dataclass(frozen=True)
    class MergeFlags:
        \"\"\"Files.\"\"\"

        input: tuple[Path, ...] = required("Pairs to merge.", metavar="PREFIX ...")

    flags = read(argv, __doc__, MergeFlags)[MergeFlags]

Help, mistakes and notes follow from the declarations; all mistakes are told at once. A user may cut
a flag short, as long as no other flag has the same beginning.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from megatron.flags.checks import check
from megatron.flags.declare import Declaration
from megatron.flags.groups import Flags, Reading, Rule, all_declarations, filled
from megatron.flags.help import help_text, summary
from megatron.flags.pipes import end_without_reader, show
from megatron.flags.readable import as_error, nearest, readable
from megatron.flags.rules import refuses
from megatron.flags.words import SortedWords, as_written, no_flag, split


def read(
    argv: Sequence[str] | None,
    about: str | None,
    *groups: type,
    rules: Iterable[Rule] = (),
    speak: bool = True,
    usage: str = "",
    others: list[str] | None = None,
) -> Flags:
    """Return the flags of a command line.

    Args:
        argv: words of the command line, without the program; ``None``: the words of this process.
        about: purpose of the command, for its help.
        groups: groups of its flags.
        rules: yield a line on each mistake that several flags make together.
        speak: whether notes are printed.
        usage: name of the subcommand; empty: the command has no subcommands.
        others: list to which unknown flags are added, with their words, for another command;
            ``None``: unknown flags are mistakes.

    Raises:
        SystemExit: with 0 after ``--help``, with 2 after printing mistakes.
    """
    end_without_reader()
    argv = sys.argv[1:] if argv is None else argv
    if not {"-h", "--help"}.isdisjoint(argv):
        places = [own.option for own in all_declarations(groups).values() if own.facts.place]
        words = filter(None, (Path(sys.argv[0]).name, usage, *places, "[flags]"))
        show(help_text(" ".join(words), about or "", groups))
        sys.exit(0)
    found = reading(argv, groups, rules, others)
    if found.mistakes:
        _refuse(found.mistakes)
    for note in found.notes if speak else ():
        print(f"note: {readable(note)}", file=sys.stderr)
    return found.flags


def read_command(
    argv: Sequence[str] | None,
    about: str | None,
    commands: Mapping[str, type],
    others: Mapping[str, list[str]] | None = None,
) -> Any:
    """Return the flags of a command line whose first word is a subcommand.

    Args:
        argv: words of the command line, without the program; ``None``: the words of this process.
        about: purpose of the commands, for their help.
        commands: for the name of each subcommand, the group of its flags.
        others: for each subcommand that takes flags of another command, the list to which these
            flags are added.

    Returns:
        An instance of the subcommand's group.

    Raises:
        SystemExit: with 0 after ``--help``, with 2 after printing mistakes.
    """
    end_without_reader()
    name, *words = (sys.argv[1:] if argv is None else argv) or [""]
    if name in ("-h", "--help"):
        listed = [f"  {name:<14}{summary(group)}" for name, group in commands.items()]
        usage = f"{Path(sys.argv[0]).name} COMMAND [flags]"
        show(help_text(usage, "\n".join([str(about), "commands:", *listed]), ()))
        sys.exit(0)
    if name not in commands:
        fault = f"{name} is no command" if name else "a command is missing"
        _refuse([f"{fault}: {nearest(name, commands)}give one of {', '.join(commands)}"])
    group = commands[name]
    taken = None if others is None else others.get(name)
    return read(words, "", group, usage=name, others=taken)[group]


def reading(
    argv: Sequence[str],
    groups: tuple[type, ...],
    rules: Iterable[Rule] = (),
    others: list[str] | None = None,
) -> Reading:
    """Read a command line, with or without mistakes; for the arguments see ``read``."""
    declared = all_declarations(groups)
    names = {name: own for own in declared.values() for name in own.names}
    places = [own for own in declared.values() if own.facts.place]
    found, loose, is_unsure = SortedWords(), list[str](), False
    for option, values in split(argv, short=[name for name in names if len(name) == 2]):
        meant = _meant(option, names)
        if len(meant) == 1:
            (own,) = meant.values()
            takes_all = own.takes_several or not places
            most = len(values) if takes_all else int(own.kind is not bool)
            found.take(own, values[:most], as_written(own.option, values[:most]))
            loose += values[most:]
        elif not option:
            loose += values
        elif meant:
            found.mistakes.append(f"{option} may be {' or '.join(meant)}: write it out")
        elif others is not None:
            others += [option, *values]
        else:
            shown = [name for name, own in names.items() if not own.facts.hidden]
            found.mistakes.append(no_flag(option, shown))
            is_unsure = is_unsure or bool(values)  # the values may be words without a flag
    _put_in_place(found, places, loose)
    if is_unsure:
        found.unreadable.update(own.option for own in places[len(loose) :])
    flags = filled(groups, found.given)
    told = check(flags, map(refuses, rules), found.unreadable)
    return Reading(flags, (*found.mistakes, *told.mistakes), (*found.notes, *told.notes))


def _meant(option: str, names: Mapping[str, Declaration]) -> Mapping[str, Declaration]:
    """Return the flag of this name, or all flags that begin with it."""
    if option in names or not option:
        return {option: names[option]} if option else {}
    return {own.option: own for name, own in names.items() if name.startswith(option)}


def _put_in_place(found: SortedWords, places: Sequence[Declaration], loose: Sequence[str]) -> None:
    """Take the words without a flag, in order, as the values that are told by their place.

    All that are left are values of the last place, if it repeats.
    """
    if places and places[-1].facts.repeats:
        places = [*places, *[places[-1]] * (len(loose) - len(places))]
    for own, word in zip(places, loose, strict=False):
        found.take(own, [word], as_written(own.option, [word]))
    if left := " ".join(loose[len(places) :]):
        where = f"behind {' '.join(own.option for own in places)}" if places else "before any flag"
        found.mistakes.append(f"{left!r} stands {where}: leave it out, or write its flag first")


def _refuse(mistakes: Sequence[str]) -> NoReturn:
    """Print the mistakes and end the process with 2. Several mistakes have a line each."""
    print(as_error("\n".join(mistakes)), file=sys.stderr)
    sys.exit(2)
