"""A command line as data, and edits of it: another run like this one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

from megatron.flags.groups import Flags, Reading, declarations, filled
from megatron.run.command_line import judged, run_of, with_default_batch, without_training
from megatron.run.dimension import Dimension
from megatron.run.edit import Choice, Edit, edited
from megatron.run.run_config import RunConfig
from megatron.run.topics import DECLARED, GROUPS
from megatron.run.words import sort_words
from megatron.simulator.costs.gpus import Gpu

Key = frozenset[tuple[str, tuple[str, ...]]]
"""The flags of a line with their values; equal for lines that make the same run."""


@dataclass(frozen=True)
class Line:
    """The flags of a run, each with its words, and the ranks of the job.

    Attributes:
        given: the words behind each given flag; all of them can be read.
        world_size: ranks of the job.
        edits: flags that differ from the line that the search began with, the last edit of a flag.
    """

    given: Mapping[str, tuple[str, ...]]
    world_size: int
    edits: tuple[Edit, ...] = ()

    @classmethod
    def of(cls, words: Sequence[str], world_size: int) -> "Line":
        """Return the line with these words.

        Raises:
            ValueError: a word is no flag, or its values cannot be read.
        """
        found = sort_words(words, DECLARED, world_size)
        if found.mistakes:
            raise ValueError("\n".join(found.mistakes))
        return cls({option: tuple(values) for option, values in found.given.items()}, world_size)

    def __reduce__(self) -> tuple[object, ...]:
        """Leave what was read from the line behind when it goes to another process."""
        return Line, (self.given, self.world_size, self.edits)

    def edited(self, choice: Choice) -> "Line":
        """Return the line with some edits."""
        edits = {edit.option: edit for edit in self.edits}
        for edit in choice:
            edits.pop(edit.option, None)
            edits[edit.option] = edit
        return replace(self, given=edited(self.given, choice), edits=tuple(edits.values()))

    @property
    def key(self) -> Key:
        """A key that is equal for lines with the same flags."""
        return frozenset(self.given.items())

    @property
    def edited_words(self) -> tuple[str, ...]:
        """The words of all edits."""
        return tuple(word for edit in self.edits for word in edit.words)

    @property
    def words(self) -> tuple[str, ...]:
        """The words of the whole line."""
        return tuple(word for option, values in self.given.items() for word in (option, *values))

    @cached_property
    def reading(self) -> Reading:
        """The flags with all mistakes and notes."""
        return judged(self.given, self.world_size)

    @cached_property
    def flags(self) -> Flags:
        """The flags, with or without mistakes; no rule judges them."""
        groups = {group: _group(group, _words_of(group, self.given)) for group in GROUPS}
        chosen = frozenset(edit.option for edit in self.edits)
        read = Flags(groups, self.world_size, self.given, chosen)
        return without_training(with_default_batch(read))

    @property
    def fault(self) -> str:
        """The first mistake; empty if the line makes a run."""
        return self.reading.mistakes[0] if self.reading.mistakes else ""

    def run(self, gpu: Gpu | None) -> RunConfig:
        """Return the run that the line makes, on a GPU by whose seconds plans are compared.

        Raises:
            ValueError: the line has mistakes.
        """
        if self.reading.mistakes:
            raise ValueError("\n".join(self.reading.mistakes))
        return run_of(self.reading).on(gpu)


def opened(dimensions: Sequence[Dimension], line: Line) -> tuple[Dimension, ...]:
    """Return the dimensions that the flags of a line do not decide."""
    return tuple(own for own in dimensions if line.given.keys().isdisjoint(own.closing))


def combined(line: Line, dimensions: Sequence[Dimension]) -> list[Line]:
    """Return the line with every combination of choices; rules may refuse some of them."""
    lines = [line]
    for dimension in dimensions:
        lines = [one.edited(choice) for one in lines for choice in dimension.choices(one.flags)]
    return lines


Words = tuple[tuple[str, tuple[str, ...]], ...]
"""Flags, each with the words behind it."""


@cache
def _group(group: type, words: Words) -> Any:
    """Return a group of flags with some words; the lines of a search share most of their groups."""
    return filled((group,), dict(words))[group]


def _words_of(group: type, given: Mapping[str, tuple[str, ...]]) -> Words:
    """Return the flags of a group that are given."""
    return tuple((option, given[option]) for option in _options(group) if option in given)


@cache
def _options(group: type) -> tuple[str, ...]:
    return tuple(own.option for own in declarations(group))
