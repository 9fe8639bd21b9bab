"""The words of a command line, sorted by flag before any value is read.

Every word belongs to the flag before it. The parser gets only the flags of this project whose
values can be read. Every other flag gets a mistake, or a note why it changes nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches

from megatron.config.declare import Declaration
from megatron.config.foreign.answers import ANSWERS, DECIDED, Answer, spelling
from megatron.config.foreign.line import Line


@dataclass
class SortedWords:
    """The words of a command line by flag.

    Attributes:
        given: the words behind each flag of this project; of a repeated flag the last one counts.
        written: how each of them was last written; some flags have a second name.
        unreadable: flags of this project whose words make no value, or whose value another flag
            would decide that is refused.
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
        written = _written(option, values)
        answer = None if option in declared else ANSWERS.to(option, values, line)
        if option in declared:
            _take_or_answer(found, declared, option, values, line, written)
        elif answer is None or _is_misspelt(option, declared):
            found.mistakes.append(_unknown(option, values, declared))
        elif answer.kind == "rewritten":
            _read_as(found, declared, answer.words(values, line), line, written)
        else:
            _tell(found, written, answer)
            if answer.feature in DECIDED:
                found.unreadable.add(DECIDED[answer.feature])
    return found


def _line(argv: Sequence[str], declared: Mapping[str, Declaration], world_size: int) -> Line:
    """The flags as written, and ours of which some are plain other names."""
    given = dict(_flags_with_words(argv))
    ours: dict[str, Sequence[str]] = {}
    for option, values in given.items():
        answer = None if option in declared else ANSWERS.to(option, values, Line({}))
        if answer is not None and answer.is_name:
            ours.update(_flags_with_words(answer.words(values, Line({}))))
    return Line(given | ours, world_size)


def _take_or_answer(
    found: SortedWords,
    declared: Mapping[str, Declaration],
    option: str,
    values: Sequence[str],
    line: Line,
    written: str,
) -> None:
    """Take a flag of ours, unless it has a value of Megatron's that needs an answer."""
    answer = ANSWERS.to_ours(option, values, line)
    if answer is None:
        _take(found, declared[option], values, written)
    elif answer.kind == "rewritten":
        _read_as(found, declared, answer.words(values, line), line, written)
    elif answer.kind == "noted":
        _tell(found, written, answer)
    else:
        _refuse(found, declared[option], written, answer)


def _read_as(
    found: SortedWords,
    declared: Mapping[str, Declaration],
    words: Sequence[str],
    line: Line,
    written: str,
) -> None:
    """Take the flags of ours that another one is read as."""
    _note(found, f"{written} is read as {' '.join(words) or 'what holds anyway'}")
    ours = list(_flags_with_words(words))
    for option, values in ours:
        answer = ANSWERS.to_ours(option, values, line)
        name = written if len(ours) == 1 else _written(option, values)
        if answer is not None and answer.kind == "refused":
            _refuse(found, declared[option], name, answer)
        else:
            _take(found, declared[option], values, name)


def _refuse(found: SortedWords, declaration: Declaration, written: str, answer: Answer) -> None:
    _tell(found, written, answer)
    found.unreadable.add(declaration.option)


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


def _is_misspelt(option: str, declared: Mapping[str, Declaration]) -> bool:
    """Return whether a flag is answered by a pattern only, and nearly is one of this project."""
    if not option or option in ANSWERS.exact:
        return False
    return bool(get_close_matches(option, declared, n=1, cutoff=0.95))


def _unknown(option: str, values: Sequence[str], declared: Mapping[str, Declaration]) -> str:
    """The line on words that have no answer: an unknown flag, or other values than one takes."""
    if not option:
        return f"{' '.join(values)!r} stands before any flag: leave it out, or write its flag first"
    known = [] if _is_misspelt(option, declared) else ANSWERS.of(option)
    forms = list(dict.fromkeys(answer.form for answer in known))
    if forms == [""]:
        return f"{option} takes no value, got {' '.join(values)!r}"
    if forms:
        ways = " or ".join(_written(option, [form] if form else []) for form in forms)
        return f"{_written(option, values)}: write {ways}, or leave it out"
    near = get_close_matches(option, [*declared, *ANSWERS.exact], n=1)
    return f"{option} is no flag: {f'did you mean {near[0]}? ' if near else ''}see --help"


def _tell(found: SortedWords, written: str, answer: Answer) -> None:
    """Note or refuse a flag."""
    if answer.kind == "refused":
        found.mistakes.append(f"{written}: {answer.reason}")
    else:
        where = f" {answer.where}" if answer.where else ""
        _note(found, f"{written} changes nothing{where}: {answer.reason}")


def _note(found: SortedWords, note: str) -> None:
    if note not in found.notes:
        found.notes.append(note)


def _written(option: str, values: Sequence[str]) -> str:
    """The flag and its words, for a message."""
    return " ".join([option, *values])
