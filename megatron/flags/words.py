"""The words of a command line, sorted by flag before any value is read."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from megatron.flags.declare import Declaration


@dataclass
class SortedWords:
    """The words of a command line by flag.

    Attributes:
        given: the words behind each declared flag; of a repeated flag the last one counts.
        written: how each of them was last written; some flags have a second name.
        unreadable: declared flags whose words make no value, or whose value another flag would
            decide that is refused.
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
        """The words of the flags that can be read."""
        return [word for option, values in self.given.items() for word in (option, *values)]

    def note(self, note: str) -> None:
        """Take a note, once."""
        if note not in self.notes:
            self.notes.append(note)

    def take(self, declaration: Declaration, values: Sequence[str], written: str) -> None:
        """Take a declared flag. A repeated flag replaces the earlier one, with a note.

        Args:
            declaration: of the flag.
            values: its words.
            written: the flag and its words as the user wrote them, perhaps by another name.
        """
        option, mistake = declaration.option, declaration.unreadable(values)
        before = self.written.get(option)
        if mistake is not None:
            self.unreadable.add(option)
            self.mistakes.append(mistake)
            return
        if before is not None and declaration.facts.repeats:
            values = [*self.given[option], *values]
        elif before is not None and list(values) == list(self.given[option]):
            self.note(f"{written} changes nothing: {before} stands before it")
            return
        elif before is not None and before.split()[0] != written.split()[0]:
            self.mistakes.append(
                f"{written} contradicts {before}, which stands before it: give one of them"
            )
            return
        elif before is not None:
            self.note(f"{before} changes nothing: {written} stands after it")
        self.given[option], self.written[option] = values, written


def split(argv: Sequence[str], short: Collection[str] = ()) -> Iterator[tuple[str, list[str]]]:
    """Yield each flag with the words up to the next; words before the first flag belong to "".

    Args:
        argv: words of a command line, without the program.
        short: the flags that have one dash and one letter; a value may follow at once, as in -p4.
    """
    option, values = "", list[str]()
    for word in argv:
        if word.startswith("--"):
            begun, equals, value = word.partition("=")
        elif word[:2] in short:
            begun, equals, value = word[:2], word[2:], word[2:].removeprefix("=")
        else:
            values.append(word)
            continue
        if option or values:
            yield option, values
        option, values = spelling(begun), [value] if equals else []
    if option or values:
        yield option, values


def spelling(word: str) -> str:
    """Return a flag with hyphens only: ``--num_layers`` is known too."""
    return word.replace("_", "-") if word.startswith("--") else word


def no_flag(option: str, known: Collection[str]) -> str:
    """The line on a flag that does not exist, with the known flag that is most like it."""
    return f"{option} is no flag: {nearest(option, known)}see --help"


def nearest(word: str, known: Collection[str]) -> str:
    """Ask for the known word that is most like another one, or for nothing."""
    from difflib import get_close_matches  # most command lines are right, and start sooner

    near = get_close_matches(word, known, n=1)
    return f"did you mean {near[0]}? " if near else ""


def as_written(option: str, values: Sequence[str]) -> str:
    """The flag and its words, for a message."""
    return " ".join([option, *values])
