"""The runs that a search has looked at, and which of them it takes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from megatron.planning.candidate import Candidate
from megatron.planning.known import Known, best_known, costs
from megatron.planning.search.dimensions import DIMENSIONS, last_resorts
from megatron.planning.search.rough import Combination
from megatron.run.line import Line

_TELLING_APART: Final = tuple(own.options[0] for own in DIMENSIONS if own.kind != "factor")
"""Flags of which one at least differs between runs that an answer names."""


class Way(NamedTuple):
    """A run that the search has looked at, with its known time and memory.

    Attributes:
        choices: its choice in every open dimension.
        line: its flags.
        known: its time and memory.
    """

    choices: Combination
    line: Line
    known: Known


@dataclass
class Found:
    """The result of a search.

    Attributes:
        ways: the runs that fit, the fastest first.
        too_large: runs that do not fit, the fastest first.
        taken: of all within ``NEAR`` of the fastest, the run with the fewest ``LAST_RESORTS``, and
            of these the run that holds the least; ``None``: no run fits.
        candidate: the taken run with its plan; ``None``: its plan has too many passes to be made.
        refused: why some choices make no run, each reason once.
        combinations: number of combinations that were ranked.
    """

    ways: list[Way] = field(default_factory=list)
    too_large: list[Way] = field(default_factory=list)
    taken: Way | None = None
    candidate: Candidate | None = None
    refused: dict[str, None] = field(default_factory=dict)
    combinations: int = 0


def by_seconds(ways: Iterable[Way]) -> list[Way]:
    """Return runs, the fastest first; of equally fast ones, first the one that holds less."""
    return sorted(ways, key=costs)


def distinct(ways: Iterable[Way]) -> list[Way]:
    """Return runs without those that have the layout, schedule and treatment of an earlier one."""
    found: dict[tuple[object, ...], Way] = {}
    for way in ways:
        found.setdefault(tuple(map(way.line.given.get, _TELLING_APART)), way)
    return list(found.values())


def varied(ways: Sequence[Way], number: int) -> list[Way]:
    """Return up to ``number`` of some runs that fit, the fastest first.

    A run that is slower than another, holds as much and has as many ``LAST_RESORTS`` is returned
    only if others are too few. If possible, runs are ``distinct``.
    """

    def price(way: Way) -> tuple[float, ...]:
        return *costs(way), last_resorts(way.line)

    def beats(way: Way, other: Way) -> bool:
        pairs = list(zip(price(way), price(other), strict=True))
        return price(way) != price(other) and all(mine <= its for mine, its in pairs)

    useful = [way for way in ways if not any(beats(other, way) for other in ways)]
    found = {way.line.key: way for way in (*distinct(useful), *useful, *distinct(ways))}
    return by_seconds(list(found.values())[:number])


def best_of(ways: Sequence[Way]) -> Way | None:
    """Return the run to take of all within ``NEAR`` of the fastest (``Found.taken``)."""
    return best_known(ways, lambda way: last_resorts(way.line))


def best_first(ways: Sequence[Way]) -> list[Way]:
    """Return the run to take of some runs, if there are any."""
    best = best_of(ways)
    return [] if best is None else [best]
