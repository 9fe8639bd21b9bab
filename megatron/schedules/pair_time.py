"""How long the two passes of a pair take together, in which each works while the other one waits.

If the steps of both passes are known, their turns are followed step by step. ``Turns`` runs passes
in the same turns (``megatron.parallel.turns``). Otherwise the time follows from sums alone.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, Literal, NamedTuple

from megatron.schedules.pair_steps import FindsSteps, PairStep, PairSteps, Sends, Waits, Works
from megatron.schedules.passes import BEGINNERS, PAUSING, PassKind
from megatron.schedules.turn_order import TurnOrder, searched_turns, usual_turns

NEGLIGIBLE: Final = 0.002
"""Share of the work of a pair that may be idle without a search for better turns."""


class InTurns(NamedTuple):
    """A pass of a pair.

    Attributes:
        kind: of the pass.
        time: of the pass alone.
        waits: the part of it in which the pass waits for collectives.
        journeys: how often it lets the other pass work, as in ``Costs``.
        steps: returns the steps of the pass, if they are known.
    """

    kind: PassKind
    time: float
    waits: float
    journeys: int
    steps: FindsSteps | None = None

    def beside(self, pieces: int) -> tuple[float, float, float]:
        """Return the work and the waits beside a pass of so many pieces, and the time alone.

        A pass that hands over more often than the other one has pieces ends alone.
        """
        share = min(1.0, pieces / max(1, self.journeys))
        return share * (self.time - self.waits), share * self.waits, (1 - share) * self.time


def joined_time(
    one: InTurns,
    other: InTurns,
    *,
    crowds: bool = True,
    turns: TurnOrder | Literal["quickest"] | None = "quickest",
) -> float:
    """Return the time of a pair.

    A pass without steps works all its time. If a pass takes longer than its steps say, because
    other collectives are under way, the pair takes longer by the same share.

    Args:
        one: a pass of the pair.
        other: the other one.
        crowds: whether work is slower while collectives of the pair are under way.
        turns: of a program. They stay as they are, even if others are quicker at these times.
            ``None``: the passes switch wherever they can. Turns of passes with other pieces count
            as ``quickest``.
    """
    if one.steps is None and other.steps is None:
        return time_by_sums(one, other)
    pair = _Pair.of(one, other)
    if isinstance(turns, str) or (turns is not None and not pair.has(turns)):
        turns = pair.order
    together = pair.time(turns, crowds=crowds)
    alone = sum(_time((own,), (len(own.pieces),), crowds=True) for own in pair.steps)
    return (one.time + other.time) * together / alone if alone else 0.0


def order_of_turns(one: InTurns, other: InTurns) -> TurnOrder | None:
    """Return the turns of a pair; ``None``: its passes switch wherever they can."""
    if one.steps is None or other.steps is None:
        return None
    return _Pair.of(one, other).order


class _Pair(NamedTuple):
    """Two passes of which one has known steps, at least.

    Attributes:
        kinds: of the passes. The first one begins if no order of turns says otherwise.
        steps: of the passes.
    """

    kinds: tuple[PassKind, PassKind]
    steps: tuple[PairSteps, PairSteps]

    @classmethod
    def of(cls, one: InTurns, other: InTurns) -> "_Pair":
        """Return the pair of two passes; one without steps works all its time."""
        begins, joins = sorted((one, other), key=lambda own: BEGINNERS.index(own.kind))
        first, second = (
            _at_once(own.time) if own.steps is None else own.steps() for own in (begins, joins)
        )
        return cls((begins.kind, joins.kind), (first, second))

    def has(self, order: TurnOrder) -> bool:
        """Whether these are turns of these passes: each has as many pieces."""
        if order.begins not in self.kinds:
            return False
        begins = self.kinds.index(order.begins)
        has = [sum(order.pieces[own::2]) for own in (0, 1)]
        return has == [len(self.steps[own].pieces) for own in (begins, 1 - begins)]

    @property
    def _pauses(self) -> bool:
        return all(kind in PAUSING for kind in self.kinds)

    @property
    def order(self) -> TurnOrder | None:
        """The quickest known turns of an F and a B; ``None``: the passes switch where they can."""
        first, second = self.steps
        key = second, self._pauses
        if key not in first.known:
            first.known[key] = self._better() if self._pauses else None
        order: TurnOrder | None = first.known[key]
        return order

    def _better(self) -> TurnOrder | None:
        first, second = self.steps
        if self.time(None, crowds=False) <= (1 + NEGLIGIBLE) * (first.work + second.work):
            return None
        swaps, pieces = searched_turns(first, second)
        found = TurnOrder(self.kinds[swaps], pieces)
        return found if self.time(found, crowds=True) < self.time(None, crowds=True) else None

    def time(self, order: TurnOrder | None, *, crowds: bool) -> float:
        """Return the end of the pair if its passes run in this order; see ``order``."""
        first, second = self.steps
        key = second, self._pauses, order, crowds
        if key not in first.known:
            passes = self.steps
            if order is None:
                pieces = usual_turns(first, second, pauses=self._pauses)
            else:
                pieces = order.pieces
                passes = passes if order.begins == self.kinds[0] else passes[::-1]
            first.known[key] = _time(passes, pieces, crowds=crowds)
        seconds: float = first.known[key]
        return seconds


@lru_cache(maxsize=4096)
def _at_once(seconds: float) -> PairSteps:
    return PairSteps((Works(seconds),))


def time_by_sums(one: InTurns, other: InTurns) -> float:
    """Return the time of a pair of which only sums are known.

    A pass works for c and waits for x. The collectives of the one run during the work of the other,
    so both take max(c of the first, x of the second) and max(c of the second, x of the first). The
    pieces of a pass take equally long. Where one pass has fewer pieces, the rest of the other one
    runs alone.
    """
    work, waits, alone = one.beside(max(1, other.journeys))
    its_work, its_waits, its_alone = other.beside(max(1, one.journeys))
    return max(work, its_waits) + max(its_work, waits) + alone + its_alone


def beside(clock: float, seconds: float, until: float, crowding: float) -> float:
    """Return the end of work that begins at ``clock`` during a communication.

    Args:
        clock: begin of the work.
        seconds: seconds of the work without the communication.
        until: end of the communication.
        crowding: share by which the communication slows the work.
    """
    slow = min(seconds * (1 + crowding), max(0.0, until - clock))
    return clock + slow + seconds - slow / (1 + crowding)


class _Device:
    """A device on which passes compute, and whose collectives run beside them."""

    def __init__(self, *, crowds: bool) -> None:
        self.clock = 0.0
        self._crowds = crowds
        self._free: dict[str, float] = {}
        self._until = self._crowding = 0.0

    def works(self, seconds: float) -> None:
        """Compute."""
        self.clock = beside(self.clock, seconds, self._until, self._crowding)

    def sends(self, step: Sends) -> float:
        """Begin a collective, and return its end."""
        end = max(self.clock, self._free.get(step.axis, 0.0)) + step.seconds
        self._free[step.axis] = end
        if end >= self._until:
            self._until, self._crowding = end, step.crowding if self._crowds else 0.0
        return end


class _Player:
    """A pass that runs in turns."""

    def __init__(self, pieces: Sequence[Sequence[PairStep]], device: _Device) -> None:
        self._pieces, self._device = iter(pieces), device
        self._ends: list[float] = []

    def play(self) -> None:
        """Run the next piece."""
        device = self._device
        for step in next(self._pieces):
            if isinstance(step, Works):
                device.works(step.seconds)
            elif isinstance(step, Sends):
                self._ends.append(device.sends(step))
            elif isinstance(step, Waits):
                device.clock = max(device.clock, self._ends[step.number])


def _time(passes: Sequence[PairSteps], pieces: Sequence[int], *, crowds: bool) -> float:
    """Return the end of passes that have turns alternately, of so many pieces each."""
    device = _Device(crowds=crowds)
    players = [_Player(own.pieces, device) for own in passes]
    for number, length in enumerate(pieces):
        for _ in range(length):
            players[number % len(players)].play()
    return device.clock
