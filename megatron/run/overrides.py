"""Which flags of flag files hold: of two that say the same, or exclude each other, the later."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from megatron.flags.conditions import alternatives, holds
from megatron.flags.declare import Declaration
from megatron.flags.words import split
from megatron.run.flag_files import WrittenFlag
from megatron.run.foreign.answers import ANSWERS
from megatron.run.foreign.line import Line

_LENGTHS: Final = frozenset({"--train-iters", "--train-samples"})
"""Flags that say the same in other units; a rule, not a declaration, allows only one of them."""


def in_effect(
    flags: Sequence[WrittenFlag], declared: Mapping[str, Declaration]
) -> tuple[list[WrittenFlag], list[str]]:
    """Return the flags that hold, with a note on each flag that a later one replaces.

    A flag replaces an earlier one of the same name, and one of another file that it excludes. Two
    flags of which neither is in a file stay, because the command line has its own rules for them.

    Args:
        flags: the flags in the order in which they stand.
        declared: the flags of this project, as they stand on a command line.
    """
    if not any(flag.file for flag in flags):
        return list(flags), []
    names = [_name(flag, declared) for flag in flags]
    last = {name: at for at, name in enumerate(names) if name}
    kept, notes = list[WrittenFlag](), list[str]()
    for at, flag in enumerate(flags):
        later = [flags[other] for other in _rivals(at, names, last)]
        winner = next((own for own in later if _replaces(own, flag, declared)), None)
        if winner is None:
            kept.append(flag)
        else:
            notes.append(f"{flag.shown} changes nothing: {winner.shown} stands after it")
    return kept, notes


def _rivals(at: int, names: Sequence[str], last: Mapping[str, int]) -> Iterator[int]:
    """Yield the places of later flags, the last one of each name; that of the same name first."""
    if not names[at]:
        return
    if last[names[at]] > at:
        yield last[names[at]]
    yield from (other for other in last.values() if other > at)


def _replaces(later: WrittenFlag, flag: WrittenFlag, declared: Mapping[str, Declaration]) -> bool:
    if not (later.file or flag.file):
        return False
    if _name(later, declared) == _name(flag, declared):
        return True
    return later.file != flag.file and (
        _excludes(later, flag, declared) or _excludes(flag, later, declared)
    )


def _excludes(one: WrittenFlag, other: WrittenFlag, declared: Mapping[str, Declaration]) -> bool:
    """Return whether the declaration of a flag excludes another one with its values."""
    if one.option not in declared:
        return False
    line = Line({other.option: other.values})
    return any(
        other.option in condition.split() and bool(holds(condition, line))
        for condition in alternatives(declared[one.option].facts.excludes)
    )


def _name(flag: WrittenFlag, declared: Mapping[str, Declaration]) -> str:
    """Return the name under which a flag counts: of its field, if several flags spell it."""
    option, line = flag.option, Line({})
    answer = None if option in declared else ANSWERS.to(option, flag.values, line)
    if answer is not None and answer.is_name:
        ours = [own for own, _ in split(answer.words(flag.values, line))]
        option = ours[0] if len(ours) == 1 else option
    if option in _LENGTHS:
        return "length"
    own = declared.get(option)
    return option if own is None or own.spelling is None else own.name
