"""A dimension of the search: one property of a run, and the ways that it can go."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from megatron.run.edit import Choice
from megatron.run.line import Line

Kind = Literal["shape", "factor", "pipeline", "order"]
"""What the choices of a dimension change, which says how they are first judged (``coarse.py``).

shape: what a rank computes for a layer; every combination is counted. factor: by how much a layer
takes longer or holds less; each choice is counted once, with everything else as it is, and is taken
to change every combination by the same factor. pipeline: the stages, over which work and memory are
spread. order: the order of the passes, which only plans can judge. An order may change a layer by a
factor too (``counted``).
"""

Choices = Callable[[Line], Sequence[Choice]]


class Dimension(NamedTuple):
    """A property of a run that a search may choose.

    Attributes:
        name: the property, for tables.
        kind: what its choices change.
        options: the flags that its choices set.
        choices: returns its choices beside the flags of a line, the most promising first. A choice
            that a rule refuses is passed over.
        closing: the flags with which the user decides the property, so that nothing is chosen.
        stand_ins: number of the first choices that stand for all others while layouts are compared.
        counted: whether choices of an order change a layer too, and are counted as a factor is.
        beside: flags of factors that decide which choices of an order there are.
        later: whether a search with the first choice alone comes before, with all estimates of its
            own. So a dimension that is added makes no answer worse.
    """

    name: str
    kind: Kind
    options: tuple[str, ...]
    choices: Choices
    closing: tuple[str, ...]
    stand_ins: int = 1
    counted: bool = False
    beside: tuple[str, ...] = ()
    later: bool = False

    @property
    def at_first(self) -> "Dimension":
        """The dimension as it is searched first: with the first choice alone if it is ``later``."""
        choices = self.choices
        return self._replace(choices=lambda line: choices(line)[:1]) if self.later else self


def opened(dimensions: Sequence[Dimension], line: Line) -> tuple[Dimension, ...]:
    """Return the dimensions that the flags of a line leave open."""
    return tuple(own for own in dimensions if line.given.keys().isdisjoint(own.closing))


def combined(line: Line, dimensions: Sequence[Dimension]) -> list[Line]:
    """Return the line with every combination of choices; rules may refuse some of them."""
    lines = [line]
    for dimension in dimensions:
        lines = [one.edited(choice) for one in lines for choice in dimension.choices(one)]
    return lines
