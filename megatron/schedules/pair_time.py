"""How long the two passes of a pair take together, in which each works while the other one waits.

If the steps of both passes are known, their turns are followed step by step, in the order in which
``megatron.parallel.turns`` lets them run. Otherwise the time follows from sums alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from megatron.schedules.passes import BEGINNERS, PAUSING, PassKind


@dataclass(frozen=True, slots=True)
class Works:
    """The pass computes for so long if it has the device alone."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Sends:
    """The pass begins a collective.

    Attributes:
        seconds: of the collective.
        axis: of its ranks; collectives of an axis run one after the other.
        crowding: share by which a pass is slower during the collective.
    """

    seconds: float
    axis: str
    crowding: float = 0.0


@dataclass(frozen=True, slots=True)
class Waits:
    """The pass waits for one of its collectives, which are numbered from 0."""

    number: int


@dataclass(frozen=True, slots=True)
class Switches:
    """The other pass goes on."""


@dataclass(frozen=True, slots=True)
class Pauses:
    """The other pass goes on, if both passes pause."""


PairStep = Works | Sends | Waits | Switches | Pauses
SWITCHES: Final = Switches()
PAUSES: Final = Pauses()


@dataclass(frozen=True, eq=False)
class PairSteps:
    """What a pass does in a pair, in order; two objects are never equal.

    Attributes:
        steps: work, collectives, waits and switches of the pass.
        known: the times of pairs in which this pass begins, so that each is found once.
    """

    steps: tuple[PairStep, ...]
    known: "dict[tuple[PairSteps, bool, bool], float]" = field(default_factory=dict)


FindsSteps = Callable[[], PairSteps]
"""Returns what a pass does, the same object in every call. Most passes are in no pair, so the steps
of a pass are found only when somebody asks."""


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


def joined_time(one: InTurns, other: InTurns, *, crowds: bool = True) -> float:
    """Return the time of a pair.

    A pass without steps works all its time. If a pass takes longer than its steps say, because
    other collectives are under way, the pair takes longer by the same share.

    Args:
        one: a pass of the pair.
        other: the other one.
        crowds: whether work is slower while collectives of the pair are under way.
    """
    if one.steps is None and other.steps is None:
        return time_by_sums(one, other)
    first, second = sorted((one, other), key=lambda own: BEGINNERS.index(own.kind))
    pauses = one.kind in PAUSING and other.kind in PAUSING
    begins, joins = (
        _at_once(own.time) if own.steps is None else own.steps() for own in (first, second)
    )
    alone = sum(_followed(own, _NOBODY, False, True) for own in (begins, joins))
    together = _followed(begins, joins, pauses, crowds)
    return (one.time + other.time) * together / alone if alone else 0.0


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


def _at_once(time: float) -> PairSteps:
    return PairSteps((Works(time),))


_NOBODY: Final = PairSteps(())


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

    def __init__(self, steps: Sequence[PairStep], device: _Device, *, pauses: bool, lags: bool):
        self._steps, self._device, self._pauses = steps, device, pauses
        self._goes_on = lags
        self._at = 0
        self._ends: list[float] = []

    @property
    def is_over(self) -> bool:
        return self._at == len(self._steps)

    def play(self) -> None:
        """Run to the next place where the other pass goes on."""
        device, steps, at = self._device, self._steps, self._at
        while at < len(steps):
            step = steps[at]
            at += 1
            if isinstance(step, Works):
                device.works(step.seconds)
            elif isinstance(step, Sends):
                self._ends.append(device.sends(step))
            elif isinstance(step, Waits):
                device.clock = max(device.clock, self._ends[step.number])
            elif isinstance(step, Switches) or self._hands_over():
                break
        self._at = at

    def _hands_over(self) -> bool:
        """Return whether the other pass goes on at a pause; the first pass goes on once itself."""
        own, self._goes_on = self._goes_on, False
        return self._pauses and not own


def _followed(first: PairSteps, second: PairSteps, pauses: bool, crowds: bool) -> float:
    """Return the end of a pair whose passes take turns; ``first`` begins."""
    key = second, pauses, crowds
    if key not in first.known:
        first.known[key] = _end_of(first, second, pauses=pauses, crowds=crowds)
    return first.known[key]


def _end_of(first: PairSteps, second: PairSteps, *, pauses: bool, crowds: bool) -> float:
    device = _Device(crowds=crowds)
    turn, other = (
        _Player(own.steps, device, pauses=pauses, lags=lags)
        for own, lags in ((first, True), (second, False))
    )
    while not (turn.is_over and other.is_over):
        turn.play()
        if not other.is_over:
            turn, other = other, turn
    return device.clock
