"""The words of a command line, sorted by flag before any value is read.

Every word belongs to the flag before it. The parser gets only the flags of this project whose
values can be read. Every other flag gets a mistake, or a note why it changes nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches

from megatron.config.declare import Declaration
from megatron.config.foreign.answer import Answer, spelling
from megatron.config.foreign.line import Line
from megatron.config.foreign.tables import OTHER_FLAGS, OTHER_VALUES


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


def sort_words(
    argv: Sequence[str], declared: Mapping[str, Declaration], world_size: int = 1
) -> SortedWords:
    """Sort a command line.

    Args:
        argv: its words, without the program.
        declared: the flags of this project, as they stand on a command line.
        world_size: ranks of the job.
    """
    found = SortedWords()
    line = _line(argv, declared, world_size)
    for option, values in _flags_with_words(argv):
        answer = _answer_to(option, values, line, option in declared)
        written = _written(option, values)
        if answer is not None and answer.kind == "rewritten":
            _read_as(found, declared, written, answer.words(values, line))
        elif answer is not None:
            _tell(found, written, answer)
        elif option in declared:
            _take(found, declared[option], values, written)
        else:
            found.mistakes.append(_unknown(option, values, declared))
        if option in declared and answer is not None and answer.kind == "refused":
            found.unreadable.add(option)
    return found


def _line(argv: Sequence[str], declared: Mapping[str, Declaration], world_size: int) -> Line:
    """The flags as written, and those that other names are read as."""
    given = dict(_flags_with_words(argv))
    line = Line(given, world_size)
    known = dict(given)
    for option, values in given.items():
        answer = _answer_to(option, values, line, option in declared)
        if answer is not None and answer.kind == "rewritten":
            known.update(_flags_with_words(answer.words(values, line)))
    return Line(known, world_size)


def _answer_to(option: str, values: Sequence[str], line: Line, ours: bool) -> Answer | None:
    """The answer of the tables; ``None`` to a flag of ours, or one that they do not know."""
    return (OTHER_VALUES if ours else OTHER_FLAGS).to(option, values, line)


def _read_as(
    found: SortedWords, declared: Mapping[str, Declaration], written: str, words: Sequence[str]
) -> None:
    ours = list(_flags_with_words(words))
    read = " ".join(words) or "what holds anyway"
    _note(found, f"{written} is read as {read}")
    for option, values in ours:
        _take(found, declared[option], values, written if len(ours) == 1 else " ".join(words))


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
    """The line on words that have no answer: an unknown flag, or other values than one takes."""
    if not option:
        return f"{' '.join(values)} stands before any flag: leave it out, or write its flag first"
    forms = list(dict.fromkeys(answer.form for answer in OTHER_FLAGS.of(option)))
    if forms == [""]:
        return f"{option} takes no value, got {' '.join(values)!r}"
    if forms:
        ways = " or ".join(_written(option, [form] if form else []) for form in forms)
        return f"{_written(option, values)}: write {ways}, or leave it out"
    near = get_close_matches(option, [*declared, *OTHER_FLAGS.exact], n=1)
    return f"{option} is no flag: {f'did you mean {near[0]}? ' if near else ''}see --help"


def _tell(found: SortedWords, written: str, answer: Answer) -> None:
    """Note or refuse a flag."""
    if answer.kind == "refused":
        found.mistakes.append(f"{written}: {answer.reason}")
    else:
        when = f" {answer.when.words}" if answer.when else ""
        _note(found, f"{written} changes nothing{when}: {answer.reason}")


def _note(found: SortedWords, note: str) -> None:
    if note not in found.notes:
        found.notes.append(note)


def _written(option: str, values: Sequence[str]) -> str:
    return " ".join([option, *values])
