"""Answers to flags that do not exist here, read from ``table.txt``, which describes its form.

"Our" flags are the flags of this project. A "line" is a command line.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final, Literal

from megatron.flags.conditions import holds
from megatron.flags.groups import declarations
from megatron.flags.words import spelling
from megatron.run.foreign.line import COMPUTED, Line
from megatron.schedules.block_options import BlockOptions
from megatron.schedules.plan_flags import PLAN_FLAGS

Kind = Literal["rewritten", "noted", "refused"]


@dataclass(frozen=True)
class Answer:
    """The answer to a flag with some values, on some lines.

    Attributes:
        kind: ``rewritten``: the flag is read as flags of ours with the same meaning. ``noted``: the
            flag changes nothing. ``refused``: the flag's effect would be missing.
        reason: by kind: the words that the flag is read as, with {} for its values; the reason why
            it changes nothing; or the missing feature and the way out.
        form: form of the values that the answer is for.
        where: the lines that the answer is for, in words; empty: all lines.
        condition: the same lines, as a condition in the language of ``megatron.flags.conditions``.
        computed: name of the function that forms the words that the flag is read as; empty: the
            words are ``reason``.
        feature: name of the missing feature, for a refusal.
    """

    kind: Kind
    reason: str
    form: str = ""
    where: str = ""
    condition: str = ""
    computed: str = ""
    feature: str = ""

    @property
    def is_name(self) -> bool:
        """Whether the flag is another name of flags of ours, on every line."""
        return self.kind == "rewritten" and not self.where and not self.computed

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
        return self.takes(values) and bool(not self.condition or holds(self.condition, line))

    def words(self, values: Sequence[str], line: Line) -> list[str]:
        """The words that a rewritten flag is read as."""
        if self.computed:
            return COMPUTED[self.computed](line, values).split()
        return [w for part in self.reason.split() for w in (values if part == "{}" else [part])]


def _above(word: str, limit: float) -> bool:
    try:
        return float(word) > limit
    except ValueError:
        return False


Row = tuple[str, Answer]
"""A flag, or a pattern of flags, and an answer to it."""


class Answers:
    """The answers to many flags.

    Args:
        rows: flags with answers. For a flag with its values on a command line, the first row that
            fits is the answer. Rows with patterns are for flags that no row names in full.
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
        """The answers to each flag that stands in the rows with its whole name."""
        return self._exact

    def of(self, option: str) -> Sequence[Answer]:
        """Return all answers to a flag; empty if there are none."""
        if option in self._exact:
            return self._exact[option]
        return [answer for pattern, answer in self._patterns if fnmatchcase(option, pattern)]

    def to(self, option: str, values: Sequence[str], line: Line) -> Answer | None:
        """Return the answer to a flag with these values on this line; ``None``: there is none."""
        found = (answer for answer in self.of(option) if answer.is_for(values, line))
        return next(found, None)

    def to_ours(self, option: str, values: Sequence[str], line: Line) -> Answer | None:
        """Return the answer to a flag of ours with a value of Megatron; ``None``: there is none."""
        return self.to(option, values, line) if option in self._exact else None


@dataclass(frozen=True)
class Block:
    """A block of the table.

    Attributes:
        kind: kind of its answer: read as, noted, missing or idle.
        facts: for each name that begins a line, the text behind it. The first name is the kind.
        flags: each flag of the block, with the form of its values.
    """

    kind: str
    facts: Mapping[str, str]
    flags: Sequence[tuple[str, str]]

    def rows(self, kind: Kind, reason: str, feature: str = "") -> Iterator[Row]:
        """Yield each flag of the block with its answer, for the lines that the block names."""
        where = self.facts.get("where", "")
        condition, computed = self.facts.get("if", where), self.facts.get("computed", "")
        for option, form in self.flags:
            yield option, Answer(kind, reason, form, where, condition, computed, feature)


@dataclass(frozen=True)
class Feature:
    """A feature of Megatron that is missing here.

    Attributes:
        name: a few words, for tables.
        reason: why its flags are refused, and the way out.
        decides: a flag of ours whose value is unknown if a flag of the feature is given.
        flags: the flags that ask for the feature.
        idle: flags of the feature that ask for nothing, on some lines or on all.
    """

    name: str
    reason: str
    decides: str
    flags: Block
    idle: tuple[Block, ...]

    @property
    def noted(self) -> Iterator[Row]:
        """The idle flags, noted on the lines on which they change nothing."""
        for block in self.idle:
            yield from block.rows("noted", block.facts["idle"])

    @property
    def refused(self) -> Iterator[Row]:
        """The flags that are refused on all lines for which no earlier row has an answer."""
        for block in (self.flags, *(block for block in self.idle if "where" in block.facts)):
            for option, form in block.flags:
                yield option, Answer("refused", self.reason, form, feature=self.name)


def blocks_of(table: str) -> Iterator[Block]:
    """Read the blocks of a table. The text above its line of equals signs is for readers only."""
    for text in re.split(r"^=+$", table, flags=re.MULTILINE)[-1].strip().split("\n\n"):
        lines = text.split("\n")
        facts = dict(line.split(": ", 1) for line in lines if not line.startswith("--"))
        flags = " ".join(line for line in lines if line.startswith("--"))
        found = re.findall(r"(--\S+)((?: (?!--)\S+)*)", flags)
        yield Block(next(iter(facts)), facts, [(spelling(o), form.strip()) for o, form in found])


def features_of(blocks: Sequence[Block]) -> Iterator[Feature]:
    """Yield the missing features, each with the idle blocks that follow its own block."""
    for place, block in enumerate(blocks):
        if block.kind == "missing":
            others = [n for n, b in enumerate(blocks) if n > place and b.kind != "idle"]
            idle = blocks[place + 1 : min(others, default=len(blocks))]
            facts = block.facts
            reason = f"{facts['lack']}; {facts['way out']}"
            yield Feature(facts["missing"], reason, facts.get("decides", ""), block, tuple(idle))


def _short_names() -> Iterator[Row]:
    """Yield the tools' short names for the flags of a plan."""
    for ours, *others in PLAN_FLAGS.values():
        for name in others:
            yield name, Answer("rewritten", f"{ours} {{}}", "N")
    for own in declarations(BlockOptions):
        for name in own.facts.names:
            form = "" if own.kind is bool else "N"
            yield name, Answer("rewritten", f"{own.option} {{}}", form)


_BLOCKS: Final = tuple(blocks_of(Path(__file__).with_name("table.txt").read_text(encoding="utf-8")))

FEATURES: Final = tuple(features_of(_BLOCKS))
"""All missing features. If two features have the same flag, the first counts."""

ANSWERS: Final = Answers(
    [
        *(
            row
            for b in _BLOCKS
            if b.kind == "read as"
            for row in b.rows("rewritten", b.facts[b.kind])
        ),
        *_short_names(),
        *(row for b in _BLOCKS if b.kind == "noted" for row in b.rows("noted", b.facts[b.kind])),
        *(row for feature in FEATURES for row in feature.noted),
        *(row for feature in FEATURES for row in feature.refused),
    ]
)
"""All answers in their order: other names of our flags, then notes, then refusals."""

DECIDED: Final = {feature.name: feature.decides for feature in FEATURES if feature.decides}
"""For the name of a missing feature, our flag whose value the feature's flags would decide."""
