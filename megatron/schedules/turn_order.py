"""Which pass of a pair goes on, wherever its passes can switch.

Passes that switch at every collective often come to the same place of their layers. There their
collectives meet, and no work hides them. If the times of all steps are known, a better order of
turns is found before the run. So the plan still decides where passes switch, and no time that a
real run takes.

The search is a beam search. Its states are numbers of pieces (``PairSteps.pieces``) that both
passes have run. Of all orders that lead to the same numbers, it keeps the few with the least clock
and the shortest collectives under way.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final, NamedTuple, TypeAlias

from megatron.schedules.pair_steps import PairSteps, Pauses, Sends, Waits, Works
from megatron.schedules.passes import PassKind

WIDTH: Final = 3
"""Orders that the search keeps among all orders of the same pieces. In six of seven pairs of 13 to
92 pieces, 20 orders in place of 3 gained at most 0.1 % of the pair's time."""

BAND: Final = 6
"""Pieces by which a pass may be ahead of an even mixture of both."""

UNDER_WAY: Final = 0.3
"""Seconds of the clock that count as much as a second of a collective under way."""


class TurnOrder(NamedTuple):
    """An order of the turns of two passes.

    Attributes:
        begins: the kind of the pass that has the first turn.
        pieces: how many pieces of a pass run in each turn; the passes have turns alternately.
    """

    begins: PassKind
    pieces: tuple[int, ...]


def usual_turns(first: PairSteps, second: PairSteps, *, pauses: bool) -> tuple[int, ...]:
    """Return the turns of passes that switch wherever they can, as ``Turns`` does by itself.

    Args:
        first: has the first turn. With ``pauses`` it goes on at its first pause.
        second: the other pass.
        pauses: whether the passes switch at pauses.
    """
    made: list[int] = []
    left = [len(first.pieces), len(second.pieces)]
    places = iter(first.places), iter(second.places)
    own, goes_on = 0, True
    while any(left):
        length = 0
        while left[own]:
            length += 1
            left[own] -= 1
            place = next(places[own], None)
            if isinstance(place, Pauses):
                switches = pauses and not (own == 0 and goes_on)
                goes_on = goes_on and own != 0
            else:
                switches = True
            if switches and left[1 - own]:
                break
        made.append(length)
        own = 1 - own
    return tuple(made)


def searched_turns(first: PairSteps, second: PairSteps) -> tuple[bool, tuple[int, ...]]:
    """Return whether ``second`` should have the first turn, and the turns of a quick pair.

    Slower work beside collectives is left out.
    """
    axes: dict[str, int] = {}
    passes = tuple([tuple(_moves(piece, axes)) for piece in own.pieces] for own in (first, second))
    played = _search(passes, len(axes))
    lengths = [(own, len(list(row))) for own, row in groupby(played)]
    return lengths[0][0] == 1, tuple(length for _, length in lengths)


_Move: TypeAlias = tuple[str, float, int]
"""Work of so many seconds, a collective of so many seconds on an axis, or the wait for the pass's
collective of this number."""


def _moves(piece: Sequence[object], axes: dict[str, int]) -> Iterator[_Move]:
    """Yield the steps of a piece as plain tuples, with numbers for axes."""
    for step in piece:
        match step:
            case Works(seconds):
                yield "works", seconds, 0
            case Sends(seconds, axis):
                yield "sends", seconds, axes.setdefault(axis, len(axes))
            case Waits(number):
                yield "waits", 0.0, number


@dataclass(slots=True)
class _State:
    """A rank after some pieces of both passes.

    Attributes:
        clock: seconds since the begin of the pair.
        free: when the collectives of every axis are over.
        ends: the ends of the collectives that each pass has begun.
        played: the pass of the last piece, and the state before it.
        score: a smaller one is better.
    """

    clock: float
    free: tuple[float, ...]
    ends: tuple[tuple[float, ...], tuple[float, ...]]
    played: "tuple[int, _State] | None" = None
    score: float = 0.0

    def after(self, own: int, piece: Sequence[_Move]) -> "_State":
        """Return the state after a piece of pass ``own``."""
        clock, free, ends = self.clock, self.free, self.ends[own]
        for kind, seconds, number in piece:
            if kind == "works":
                clock += seconds
            elif kind == "sends":
                end = max(clock, free[number]) + seconds
                free = (*free[:number], end, *free[number + 1 :])
                ends = (*ends, end)
            else:
                clock = max(clock, ends[number])
        both = (ends, self.ends[1]) if own == 0 else (self.ends[0], ends)
        under_way = sum(max(0.0, own_ends[-1] - clock) for own_ends in both if own_ends)
        return _State(clock, free, both, (own, self), clock + UNDER_WAY * under_way)


def _search(passes: Sequence[Sequence[Sequence[_Move]]], axes: int) -> list[int]:
    """Return the passes, 0 or 1, of all pieces in a quick order."""
    one, other = (len(pieces) for pieces in passes)
    band = BAND * max(one, other)
    cells = {(0, 0): [_State(0.0, (0.0,) * axes, ((), ()))]}
    for _ in range(one + other):
        found: dict[tuple[int, int], list[_State]] = {}
        for at, states in cells.items():
            for own in (0, 1):
                after = (at[0] + 1 - own, at[1] + own)
                if at[own] < len(passes[own]) and abs(after[0] * other - after[1] * one) <= band:
                    piece = passes[own][at[own]]
                    found.setdefault(after, []).extend(own_.after(own, piece) for own_ in states)
        cells = {at: _best(states) for at, states in found.items()}
    state: _State | None = min(cells[one, other], key=lambda own: own.clock)
    played: list[int] = []
    while state is not None and state.played is not None:
        own, state = state.played
        played.append(own)
    return played[::-1]


def _best(states: list[_State]) -> list[_State]:
    """Return the few states with the best scores that differ."""
    states.sort(key=lambda own: own.score)
    kept: list[_State] = []
    for state in states:
        if all((state.clock, state.free) != (own.clock, own.free) for own in kept):
            kept.append(state)
        if len(kept) == WIDTH:
            break
    return kept
