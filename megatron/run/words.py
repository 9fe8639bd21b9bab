"""The words of a command line, sorted by flag before any value is read.

A word ``@FILE`` stands for the flags of a file (``flag_files``). Every other word belongs to the
flag before it. The flags of this project whose values can be read are taken. For other flags, such
as Megatron's, ``run/foreign`` has answers. They are read as flags of this project, or get a note
why they change nothing, or a mistake.
"""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from megatron.flags.declare import Declaration
from megatron.flags.words import SortedWords, as_written, no_flag, split
from megatron.run.flag_files import WrittenFlag, read_flag_files
from megatron.run.foreign.answers import ANSWERS, DECIDED, Answer
from megatron.run.foreign.line import Line
from megatron.run.overrides import in_effect


def sort_words(
    argv: Sequence[str], declared: Mapping[str, Declaration], world_size: int = 1
) -> SortedWords:
    """Sort the words of a command line by flag; the flags of its flag files are among them.

    Args:
        argv: words of the command line, without the program.
        declared: the flags of this project, as they stand on a command line.
        world_size: ranks of the job.
    """
    read = read_flag_files(argv)
    flags, replaced = in_effect(read.flags, declared)
    found = SortedWords(notes=[*read.notes, *replaced], mistakes=list(read.mistakes))
    line = _line(flags, declared, world_size)
    for flag in flags:
        before = len(found.mistakes)
        _sort(found, declared, flag.option, flag.values, line)
        if flag.file:
            told = found.mistakes[before:]
            found.mistakes[before:] = [f"{mistake} ({flag.origin})" for mistake in told]
    return found


def _sort(
    found: SortedWords,
    declared: Mapping[str, Declaration],
    option: str,
    values: Sequence[str],
    line: Line,
) -> None:
    """Take a flag, or answer it."""
    written = as_written(option, values)
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


def _line(
    flags: Sequence[WrittenFlag], declared: Mapping[str, Declaration], world_size: int
) -> Line:
    """Return the flags as written, and also our flags that some of them are other names of."""
    given: dict[str, Sequence[str]] = {flag.option: flag.values for flag in flags}
    ours: dict[str, Sequence[str]] = {}
    for option, values in given.items():
        answer = None if option in declared else ANSWERS.to(option, values, Line({}))
        if answer is not None and answer.is_name:
            ours.update(split(answer.words(values, Line({}))))
    return Line(given | ours, world_size)


def _take_or_answer(
    found: SortedWords,
    declared: Mapping[str, Declaration],
    option: str,
    values: Sequence[str],
    line: Line,
    written: str,
) -> None:
    """Take a flag of ours, or answer it if its value is one that only Megatron has."""
    answer = ANSWERS.to_ours(option, values, line)
    if answer is None:
        found.take(declared[option], values, written)
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
    """Take the flags of ours that another flag is read as, with a note."""
    found.note(f"{written} is read as {' '.join(words) or 'what holds anyway'}")
    ours = list(split(words))
    for option, values in ours:
        answer = ANSWERS.to_ours(option, values, line)
        name = written if len(ours) == 1 else as_written(option, values)
        if answer is not None and answer.kind == "refused":
            _refuse(found, declared[option], name, answer)
        else:
            found.take(declared[option], values, name)


def _refuse(found: SortedWords, declaration: Declaration, written: str, answer: Answer) -> None:
    _tell(found, written, answer)
    found.unreadable.add(declaration.option)


def _is_misspelt(option: str, declared: Mapping[str, Declaration]) -> bool:
    """Return whether a flag that only patterns answer is almost the name of a flag of ours."""
    if not option or option in ANSWERS.exact:
        return False
    return bool(get_close_matches(option, declared, n=1, cutoff=0.95))


def _unknown(option: str, values: Sequence[str], declared: Mapping[str, Declaration]) -> str:
    """Return the line on words without an answer: an unknown flag, or values it does not take."""
    if not option:
        return f"{' '.join(values)!r} stands before any flag: leave it out, or write its flag first"
    known = [] if _is_misspelt(option, declared) else ANSWERS.of(option)
    forms = list(dict.fromkeys(answer.form for answer in known))
    if forms == [""]:
        return f"{option} takes no value, got {' '.join(values)!r}"
    if forms:
        ways = " or ".join(as_written(option, [form] if form else []) for form in forms)
        return f"{as_written(option, values)}: write {ways}, or leave it out"
    return no_flag(option, [*declared, *ANSWERS.exact])


def _tell(found: SortedWords, written: str, answer: Answer) -> None:
    """Add a note or a mistake on a flag, as its answer says."""
    if answer.kind == "refused":
        found.mistakes.append(f"{written}: {answer.reason}")
    else:
        where = f" {answer.where}" if answer.where else ""
        found.note(f"{written} changes nothing{where}: {answer.reason}")
