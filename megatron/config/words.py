"""The words of a command line, sorted by flag before any value is read.

Every word belongs to the flag before it. The parser gets only the flags of this project whose
values can be read. Every other flag gets a mistake, or a note why it changes nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches

from megatron.config.declare import Declaration
from megatron.config.other_flags import OTHER_FLAGS, Answer, spelling


@dataclass
class SortedWords:
    """The words of a command line by flag.

    Attributes:
        given: the words behind each flag of this project; of a repeated flag the last one counts.
        unreadable: flags of this project whose words make no value.
        notes: a sentence on every flag that changes nothing, each once.
        mistakes: a line on every flag that is refused, unknown or unreadable.
    """

    given: dict[str, Sequence[str]] = field(default_factory=dict)
    unreadable: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    mistakes: list[str] = field(default_factory=list)

    @property
    def words(self) -> list[str]:
        """The words that are left for the parser."""
        return [word for option, values in self.given.items() for word in (option, *values)]


def sort_words(argv: Sequence[str], declared: Mapping[str, Declaration]) -> SortedWords:
    """Sort a command line.

    Args:
        argv: its words, without the program.
        declared: the flags of this project, as they stand on a command line.
    """
    found = SortedWords()
    for option, values in _flags_with_words(argv):
        answer = OTHER_FLAGS.get(option)
        if option in declared:
            _take(found, declared[option], values)
        elif answer is None:
            found.mistakes.append(_unknown(option, values, declared))
        elif answer.kind == "rewritten" and not values:
            option, *values = answer.reason.split()
            _take(found, declared[option], values)
        else:
            _answer(found, option, values, answer)
    return found


def _flags_with_words(argv: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each flag with the words up to the next; words before the first flag belong to ""."""
    option, values = "", list[str]()
    for word in argv:
        if not word.startswith("--"):
            values.append(word)
            continue
        if option or values:
            yield option, values
        flag, equals, value = word.partition("=")
        option, values = spelling(flag), [value] if equals else []
    if option or values:
        yield option, values


def _take(found: SortedWords, declaration: Declaration, values: Sequence[str]) -> None:
    mistake = declaration.unreadable(values)
    if mistake is None:
        found.given[declaration.option] = values
    else:
        found.unreadable.add(declaration.option)
        found.mistakes.append(mistake)


def _unknown(option: str, values: Sequence[str], declared: Mapping[str, Declaration]) -> str:
    if not option:
        return f"{' '.join(values)} stands before any flag: leave it out, or write its flag first"
    near = get_close_matches(option, [*declared, *OTHER_FLAGS], n=1)
    return f"{option} is no flag: {f'did you mean {near[0]}? ' if near else ''}see --help"


def _answer(found: SortedWords, option: str, values: Sequence[str], answer: Answer) -> None:
    """Note or refuse a flag that does not exist here."""
    if answer.kind == "refused":
        found.mistakes.append(
            f"{option} is known to {answer.known_to}, not built here yet: {answer.reason}"
        )
    elif answer.values and " ".join(values) not in answer.values:
        found.mistakes.append(
            f"{' '.join([option, *values])} is not built here yet: {answer.reason}; "
            f"use {' or '.join(answer.values)}, or leave it out"
        )
    elif values and not answer.values:
        found.mistakes.append(f"{option} takes no value, got {' '.join(values)!r}")
    elif (
        note := f"{' '.join([option, *values])} changes nothing: {answer.reason}"
    ) not in found.notes:
        found.notes.append(note)
