"""What a search expects of combinations that it has not estimated, from those that it has."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from math import inf
from statistics import fmean
from typing import Final, NamedTuple

from megatron.planning.known import NEAR, Known
from megatron.planning.search.rough import Ordering, Rough

_HOPE: Final = 0.985
"""Share of the expected seconds that a combination is hoped to take if none like it was tried, and
once more for its stages, its schedule or its treatment if none with these was tried."""

_FAR: Final = 1.1
"""Combinations whose expected memory is above this multiple of the room are not estimated."""


class Learnt(NamedTuple):
    """What the last estimates of an ordering's combinations teach about its other combinations.

    Attributes:
        slowdown: their seconds over the seconds of the rough count.
        more: the bytes that they hold beyond the rough count. What a rough count misses, such as
            whole vocabulary layers on one stage, is about as large whatever the schedule holds. So
            a difference is learnt, not a factor.
    """

    slowdown: float
    more: float


class Expected:
    """Expected seconds and bytes of combinations.

    Attributes:
        spread: share by which a combination is hoped to beat its expected seconds. A run that is
            as near as that may hold less.
    """

    def __init__(self, learnt: Mapping[Ordering, Learnt] | None = None) -> None:
        """Begin with what is known of some orderings."""
        self.spread, self._hope = NEAR, _HOPE
        self._learnt = dict(learnt or {})
        self._forget()

    def soberly(self) -> None:
        """From now on expect without any hope."""
        self.spread, self._hope = 0.0, 1.0

    def hopefully(self) -> None:
        """Hope again, as at first."""
        self.spread, self._hope = NEAR, _HOPE

    def _forget(self) -> None:
        """Forget what follows from ``_learnt``."""
        self._best: dict[tuple[int, object], float] = {}
        self._least: float | None = None
        self._alike: dict[object, float] = {}

    def __contains__(self, ordering: Ordering) -> bool:
        """Whether a combination of an ordering was estimated."""
        return ordering in self._learnt

    def learn(self, rough: Rough, known: Known, *, mean: bool = False) -> None:
        """Expect of combinations with the same stages and order what is known of one.

        Args:
            rough: the rough figures of the one.
            known: what is known of it.
            mean: whether what was known before counts as much.
        """
        found = Learnt(known.seconds / rough.seconds, known.held.peak - rough.peak)
        before = self._learnt.get(rough.ordering) if mean else None
        if before is not None:
            slowdown, more = before
            found = Learnt((slowdown + found.slowdown) / 2, (more + found.more) / 2)
        self._learnt[rough.ordering] = found
        self._forget()

    def costs(self, rough: Rough) -> tuple[float, float]:
        """Return the expected seconds and the bytes of the fullest rank."""
        seconds = rough.seconds * self._slowdown(rough.ordering)
        return seconds, rough.peak + self._more_bytes(rough.ordering)

    def hoped(self, rough: Rough) -> float:
        """Return the seconds that a combination is hoped to take at least."""
        return self.costs(rough)[0] * (1 - self.spread)

    def first(
        self, ordering: Ordering, waiting: Sequence[Rough], beside: Collection[Rough] = ()
    ) -> Rough | None:
        """Return the first of an ordering's combinations that is expected to fit, if any.

        Those in ``beside`` are passed over.
        """
        more = self._more_bytes(ordering)
        return next(
            (own for own in waiting if own.peak + more <= _FAR * own.room and own not in beside),
            None,
        )

    def guessed(self, first: Rough, waiting: Mapping[Ordering, Sequence[Rough]]) -> Iterator[Rough]:
        """Yield the combinations that are likely to be estimated after ``first``, in this order.

        Every estimate is taken to find what is expected of it, without hope.
        """
        guess, taken = Expected(self._learnt), [first]
        guess._hope = self._hope
        while True:
            rough = taken[-1]
            slowdown = guess._slowdown(rough.ordering, hopes=False)
            guess._learnt[rough.ordering] = Learnt(slowdown, guess._more_bytes(rough.ordering))
            guess._forget()
            able = (
                found
                for ordering, own in waiting.items()
                if (found := guess.first(ordering, own, taken)) is not None
            )
            best = min(able, key=guess.costs, default=None)
            if best is None:
                return
            yield best
            taken.append(best)

    def _slowdown(self, ordering: Ordering, *, hopes: bool = True) -> float:
        """Return the expected seconds of an ordering's combinations over the rough seconds.

        Of an ordering that is new, each part (the stages, the schedule, the treatment) is hoped to
        be as good as it was with the best others.
        """
        if (known := self._learnt.get(ordering)) is not None:
            return known.slowdown
        if self._least is None:
            self._least = min((own.slowdown for own in self._learnt.values()), default=1.0)
            for other, own in self._learnt.items():
                for place in enumerate(other):
                    self._best[place] = min(self._best.get(place, inf), own.slowdown)
        parts = [self._best.get(place, 0.0) for place in enumerate(ordering)]
        hope = self._hope ** (1 + parts.count(0.0)) if hopes else 1.0
        return float(hope * max(self._least, *parts))

    def _more_bytes(self, ordering: Ordering) -> float:
        """Return the bytes that combinations are expected to hold beyond the rough count."""
        if (known := self._learnt.get(ordering)) is not None:
            return known.more
        stages = ordering[0]
        if stages not in self._alike:
            alike = [own.more for other, own in self._learnt.items() if other[0] == stages]
            others = [own.more for own in self._learnt.values()]
            self._alike[stages] = fmean(alike or others or [0.0])
        return self._alike[stages]
