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
        written: how each of them was last written; some flags have a second name.
        unreadable: flags of this project whose words make no value.
        notes: a sentence on every flag that changes nothing, each once.
        mistakes: a line on every flag that is refused, unknown or unreadable.
    """

    given: dict[str, Sequence[str]] = field(default_factory=dict)
    written: dict[str, str] = field(default_factory=dict)
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
            _take(found, declared[option], values, _written(option, values))
        elif answer is None:
            found.mistakes.append(_unknown(option, values, declared))
        elif answer.kind == "rewritten" and not (values and " " in answer.reason):
            ours, *fixed = answer.reason.split()
            _take(found, declared[ours], fixed or values, _written(option, values))
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


def _take(
    found: SortedWords, declaration: Declaration, values: Sequence[str], written: str
) -> None:
    """Take a flag of this project. A repeated flag replaces the earlier one, with a note.

    Args:
        found: gets the flag.
        declaration: of the flag.
        values: its words.
        written: the flag and its words as the user wrote them, perhaps by another name.
    """
    option, mistake = declaration.option, declaration.unreadable(values)
    before = found.written.get(option)
    if mistake is not None:
        found.unreadable.add(option)
        found.mistakes.append(mistake)
        return
    if before is not None and list(values) == list(found.given[option]):
        _note(found, f"{written} changes nothing: {before} stands before it")
        return
    if before is not None and before.split()[0] != written.split()[0]:
        found.mistakes.append(
            f"{written} contradicts {before}, which stands before it: give one of them"
        )
        return
    if before is not None:
        _note(found, f"{before} changes nothing: {written} stands after it")
    found.given[option], found.written[option] = values, written


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
            f"{_written(option, values)} is not built here yet: {answer.reason}; "
            f"use {' or '.join(answer.values)}, or leave it out"
        )
    elif values and not answer.values:
        found.mistakes.append(f"{option} takes no value, got {' '.join(values)!r}")
    else:
        _note(found, f"{_written(option, values)} changes nothing: {answer.reason}")


def _note(found: SortedWords, note: str) -> None:
    if note not in found.notes:
        found.notes.append(note)


def _written(option: str, values: Sequence[str]) -> str:
    return " ".join([option, *values])
