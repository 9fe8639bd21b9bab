"""What a pass does in a pair: work, collectives, waits, and places where passes can switch."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final


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
        steps: work, collectives, waits and places to switch.
        known: facts of pairs in which this pass stands first in ``BEGINNERS``, each found once.
    """

    steps: tuple[PairStep, ...]
    known: dict[Any, Any] = field(default_factory=dict)

    @cached_property
    def pieces(self) -> tuple[tuple[PairStep, ...], ...]:
        """The steps between places to switch; the last piece ends with the pass."""
        made: list[list[PairStep]] = [[]]
        for step in self.steps:
            if isinstance(step, Switches | Pauses):
                made.append([])
            else:
                made[-1].append(step)
        return tuple(map(tuple, made))

    @cached_property
    def places(self) -> tuple[Switches | Pauses, ...]:
        """The places to switch, one behind each piece but the last."""
        return tuple(step for step in self.steps if isinstance(step, Switches | Pauses))

    @cached_property
    def work(self) -> float:
        """Seconds in which the pass computes."""
        return sum(step.seconds for step in self.steps if isinstance(step, Works))


FindsSteps = Callable[[], PairSteps]
"""Returns what a pass does, the same object in every call. Most passes are in no pair, so the steps
of a pass are found only when somebody asks."""
