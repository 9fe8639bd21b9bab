"""The flags of a launch, sorted from the words behind the program."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from megatron.flags.readable import readable
from megatron.flags.words import split
from megatron.foreign.faults import MOST_FLAGS, MOST_WORDS
from megatron.foreign.values import Holes, is_hole
from megatron.run.foreign.answers import ANSWERS
from megatron.run.topics import DECLARED

NOT_WRITABLE: Final = (
    "has a second value that begins with @: here such a word names a file of flags; leave it out"
)
"""The end of the line on a flag that cannot be written."""


@dataclass(frozen=True)
class Flag:
    """A flag of a line.

    Attributes:
        option: the flag, with hyphens.
        values: the words behind it, with holes.
    """

    option: str
    values: tuple[str, ...] = ()

    def shown(self, holes: Holes) -> str:
        """Return the flag as the script writes the flag, with the known values."""
        return " ".join([self.option, *map(holes.shown, self.values)])

    def words(self, holes: Holes) -> tuple[str, ...]:
        """Return the words of a command line, with holes.

        Here a word that begins with @ names a file of flags. So a first value that begins with @
        is joined to the flag.
        """
        if self.values and holes.shown(self.values[0]).startswith("@"):
            return (f"{self.option}={self.values[0]}", *self.values[1:])
        return (self.option, *self.values)

    def fault(self, holes: Holes) -> str:
        """Return the reason why the flag cannot be written; empty: nothing prevents it."""
        if any(word.startswith("@") for word in map(holes.shown, self.words(holes))):
            return f"{readable(self.shown(holes))} {NOT_WRITABLE}"
        return ""


def sorted_flags(
    words: Sequence[str], holes: Holes
) -> tuple[tuple[Flag, ...], list[str], list[str]]:
    """Return the flags, the holes that may be further flags, and words that belong to no flag.

    Raises:
        ValueError: there are more flags or words than any training has.
    """
    if len(words) > MOST_WORDS or sum(word.startswith("--") for word in words) > MOST_FLAGS:
        raise ValueError(
            f"a line of more than {MOST_FLAGS:,} flags or {MOST_WORDS:,} words: shorten it"
        )
    flags, further, stray = list[Flag](), list[str](), list[str]()

    def is_more(word: str) -> bool:
        return _NAMES_MORE.search(holes.within(word)[0].text) is not None

    for option, values in split([word for word in words if word not in ("-h", "--help")]):
        own, behind = list(values), list[str]()
        while own and is_hole(own[-1]) and (is_more(own[-1]) or _is_too_many(option, own)):
            behind.append(own.pop())
        further += reversed(behind)
        if option:
            flags.append(Flag(option, tuple(map(without_quotes, own))))
        else:
            stray += own
    return tuple(flags), further, stray


def without_quotes(value: str) -> str:
    """Return a value without quotes that are part of it.

    In ``"--split '99,1,0'"``, an element of an array, the inner quotes reach the program. The
    parser of such values in Megatron-LM skips them.
    """
    is_quoted = len(value) > 2 and value[0] == value[-1] and value[0] in "'\""
    return value[1:-1] if is_quoted else value


_NAMES_MORE: Final = re.compile("ARG|OPT|FLAG|EXTRA", re.IGNORECASE)
"""In the name of a variable that is not set: it stands for further flags, not for a value."""


def _is_too_many(option: str, values: Sequence[str]) -> bool:
    """Return whether a flag takes fewer words than stand behind it."""
    if not option:
        return True
    if option in DECLARED:
        own = DECLARED[option]
        return not own.takes_several and len(values) > int(own.kind is not bool)
    known = ANSWERS.of(option)
    if not known:
        return len(values) > 1
    most = [len(values) if "..." in a.form else int(a.form != "") for a in known]
    return len(values) > max(most)


def name_here(option: str) -> str:
    """Return the name that a flag has here."""
    answer = next((a for a in ANSWERS.of(option) if a.is_name), None)
    return answer.reason.split()[0] if answer is not None and option not in DECLARED else option
