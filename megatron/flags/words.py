"""The words of a command line, sorted by flag before any value is read."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from megatron.flags.declare import Declaration
from megatron.flags.readable import nearest


@dataclass
class SortedWords:
    """The words of a command line by flag.

    Attributes:
        given: the words behind each declared flag. If a flag is given twice, the later words count.
        written: each of these flags as the user wrote it last, perhaps under a second name.
        unreadable: declared flags whose words make no value. Also declared flags whose value a
            refused flag would decide.
        notes: a sentence on every flag that changes nothing, each sentence once.
        mistakes: a line on every flag that is refused, unknown or unreadable.
    """

    given: dict[str, Sequence[str]] = field(default_factory=dict)
    written: dict[str, str] = field(default_factory=dict)
    unreadable: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    mistakes: list[str] = field(default_factory=list)
    _spelled: dict[str, str] = field(default_factory=dict)
    """The given flag of each field that has a flag for every value."""

    @property
    def words(self) -> list[str]:
        """The words of the flags that can be read."""
        return [word for option, values in self.given.items() for word in (option, *values)]

    def note(self, note: str) -> None:
        """Add a note, unless it is there already."""
        if note not in self.notes:
            self.notes.append(note)

    def take(self, declaration: Declaration, values: Sequence[str], written: str) -> None:
        """Take a declared flag.

        If the flag was given before and ``repeats``, the new words are added to the earlier words.
        Any other flag that was given before has the new words, and a note says so. Different words
        under two names of a flag are a mistake.

        Args:
            declaration: of the flag.
            values: the words behind the flag.
            written: the flag and its words as the user wrote them, perhaps under another name.
        """
        option, mistake = declaration.option, declaration.unreadable(values)
        before = self.written.get(option)
        if mistake is not None:
            self.unreadable.add(option)
            self.mistakes.append(mistake)
            return
        if declaration.spelling is not None:
            other = self._spelled.setdefault(declaration.name, option)
            if other != option:
                self.mistakes.append(
                    f"{self.written[other]} does not go with {written}: give one of them and leave "
                    "the other out"
                )
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
    """Yield each flag with the words up to the next flag. Words before any flag have the flag "".

    Args:
        argv: words of a command line, without the program.
        short: the flags with one dash and one letter. A value may follow without a space, as in
            -p4.
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
    """Return a flag with hyphens in place of underscores, as for ``--num_layers``."""
    return word.replace("_", "-") if word.startswith("--") else word


def no_flag(option: str, known: Collection[str]) -> str:
    """Return the line on a flag that does not exist, with the known flag that is most like it."""
    return f"{option} is no flag: {nearest(option, known)}see --help"


def as_written(option: str, values: Sequence[str]) -> str:
    """Return the flag and its words, for a message."""
    return " ".join([option, *values])
