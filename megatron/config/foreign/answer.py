"""An answer to a flag, and the tables of answers.

A table is a text of flags, each with the form of its values behind it:

    --flag              no value
    --flag N            one value
    --flag {a,b}        one value, and the answer is for these only
    --flag N>1          one value, and the answer is for greater numbers only
    --flag N ...        any number of values, at least one
    --flag* [...]       every flag that begins so, whatever its values
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from megatron.config.foreign.line import Condition, Line

Kind = Literal["rewritten", "noted", "refused"]


@dataclass(frozen=True)
class Answer:
    """The answer to a flag with some values, on some lines.

    Attributes:
        kind: ``rewritten`` to this project's flags with the same meaning; ``noted``, because it
            changes nothing; ``refused``, because its effect would be missing.
        reason: what it is read as, with {} for its values; why it changes nothing; or what is
            missing, and the way out.
        form: form of the values that the answer is for.
        when: the lines that the answer is for; ``None``: all.
        read: the words that it is read as, where they are computed; ``None``: ``reason``'s.
        feature: of a refusal, the name of what is missing.
    """

    kind: Kind
    reason: str
    form: str = ""
    when: Condition | None = None
    read: Callable[[Line, Sequence[str]], str] | None = None
    feature: str = ""

    @property
    def is_limited(self) -> bool:
        """Whether it is for some values or some lines only."""
        return self.when is not None or self.form[:1] == "{" or ">" in self.form

    @property
    def is_name(self) -> bool:
        """Whether it is another name of flags of ours, on every line."""
        return self.kind == "rewritten" and self.when is None and self.read is None

    def takes(self, values: Sequence[str]) -> bool:
        """Whether the values have the answer's form."""
        if self.form.startswith("{"):
            return " ".join(values) in self.form.strip("{}").split(",")
        if ">" in self.form:
            return len(values) == 1 and _above(values[0], float(self.form.split(">")[1]))
        if self.form == "[...]":
            return True
        if self.form.endswith("..."):
            return bool(values)
        return len(values) == (1 if self.form else 0)

    def is_for(self, values: Sequence[str], line: Line) -> bool:
        """Whether this is the answer to the flag with these values on this line."""
        return self.takes(values) and (self.when is None or self.when.holds(line))

    def words(self, values: Sequence[str], line: Line) -> list[str]:
        """The words that a rewritten flag is read as."""
        if self.read is not None:
            return self.read(line, values).split()
        return [w for part in self.reason.split() for w in (values if part == "{}" else [part])]


def _above(word: str, limit: float) -> bool:
    try:
        return float(word) > limit
    except ValueError:
        return False


Row = tuple[str, Answer]
"""A flag, or a pattern of flags, and an answer to it."""


def rows(
    kind: Kind,
    reason: str,
    flags: str,
    when: Condition | None = None,
    feature: str = "",
    read: Callable[[Line, Sequence[str]], str] | None = None,
) -> Iterator[Row]:
    """Read a table of flags that share an answer; see the module for its form."""
    for option, form in re.findall(r"(--\S+)((?: +(?!--)\S+)*)", flags):
        yield spelling(option), Answer(kind, reason, form.strip(), when, read, feature)


def spelling(word: str) -> str:
    """Return a flag with hyphens only, because the parser also accepts ``--num_layers``."""
    return word.replace("_", "-") if word.startswith("--") else word


class Answers:
    """The answers to many flags.

    Args:
        rows: the first that is for a flag's values on a line counts; patterns come last.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = tuple(rows)
        self._exact: dict[str, list[Answer]] = {}
        self._patterns = [row for row in self.rows if "*" in row[0]]
        for option, answer in self.rows:
            if "*" not in option:
                self._exact.setdefault(option, []).append(answer)

    @property
    def exact(self) -> Mapping[str, Sequence[Answer]]:
        """The answers to each flag that is known by its whole name."""
        return self._exact

    def of(self, option: str) -> Sequence[Answer]:
        """All answers to a flag; empty if it is unknown."""
        if option in self._exact:
            return self._exact[option]
        return [answer for pattern, answer in self._patterns if fnmatchcase(option, pattern)]

    def to(self, option: str, values: Sequence[str], line: Line) -> Answer | None:
        """The answer to a flag with these values on this line; ``None``: there is none."""
        found = (answer for answer in self.of(option) if answer.is_for(values, line))
        return next(found, None)
