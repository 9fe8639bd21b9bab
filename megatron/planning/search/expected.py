"""What plans of some combinations of choices teach about the combinations that have no plan."""

from statistics import fmean
from typing import Final

from megatron.planning.known import NEAR, Known
from megatron.planning.search.rough import Ordering, Rough

_HOPE: Final = 0.985
"""Share of the expected seconds that a combination is hoped to take if none like it was tried, and
once more for its stages, its schedule or its treatment if none with these was tried."""


class Expected:
    """The expected seconds and bytes of combinations, corrected by those that have plans.

    Attributes:
        spread: share by which a combination is hoped to beat its expected seconds. A run that is
            as near as that may hold less.
    """

    def __init__(self) -> None:
        """Begin without any plan."""
        self.spread = NEAR
        self._hope = _HOPE
        self._learnt: dict[Ordering, tuple[float, float]] = {}

    def soberly(self) -> None:
        """From now on expect without any hope."""
        self.spread, self._hope = 0.0, 1.0

    def knows(self, ordering: Ordering) -> bool:
        """Return whether a combination with these stages and this order has a plan."""
        return ordering in self._learnt

    def learn(self, rough: Rough, known: Known, *, mean: bool = False) -> None:
        """Expect of combinations with the same stages and order what is known of one.

        Args:
            rough: the rough figures of the one.
            known: what is known of it.
            mean: whether what was known before counts as much.
        """
        time, memory = known.seconds / rough.seconds, known.held.peak - rough.peak
        if mean and (before := self._learnt.get(rough.ordering)) is not None:
            time, memory = (before[0] + time) / 2, (before[1] + memory) / 2
        self._learnt[rough.ordering] = time, memory

    def costs(self, rough: Rough) -> tuple[float, float]:
        """Return the expected seconds and the bytes of the fullest rank."""
        seconds = rough.seconds * self._slowdown(rough.ordering)
        return seconds, rough.peak + self.more_bytes(rough.ordering)

    def hoped(self, rough: Rough) -> float:
        """Return the seconds that a combination is hoped to take at least."""
        return self.costs(rough)[0] * (1 - self.spread)

    def _slowdown(self, ordering: Ordering) -> float:
        """Return the expected seconds of an ordering's combinations over the rough seconds.

        Of an ordering that is new, each part (the stages, the schedule, the treatment) is hoped to
        be as good as it was with the best others.
        """
        if ordering in self._learnt:
            return self._learnt[ordering][0]
        hopes = [
            min((own[0] for other, own in self._learnt.items() if other[at] == part), default=0.0)
            for at, part in enumerate(ordering)
        ]
        least = min((own[0] for own in self._learnt.values()), default=1.0)
        return float(self._hope ** (1 + hopes.count(0.0)) * max(least, *hopes))

    def more_bytes(self, ordering: Ordering) -> float:
        """Return the bytes that an ordering's combinations are expected to hold beyond the rough.

        What a rough count misses, such as whole vocabulary layers on one stage, is about as large
        whatever the schedule holds. So a difference is learnt, not a factor.
        """
        if ordering in self._learnt:
            return self._learnt[ordering][1]
        alike = [own[1] for other, own in self._learnt.items() if other[0] == ordering[0]]
        others = [own[1] for own in self._learnt.values()]
        return fmean(alike or others or [0.0])
