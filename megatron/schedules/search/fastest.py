"""The fastest of several plans, without making those that cannot be it."""

from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar


class Candidate(Protocol):
    """What is compared; its plan is made when ``time`` is asked for, and once."""

    @property
    def least_time(self) -> float:
        """What ``time`` cannot be below, known without the plan."""

    @property
    def time(self) -> float:
        """Time of an iteration, in the unit of ``least_time``."""


_C = TypeVar("_C", bound=Candidate)


def fastest(
    candidates: Iterable[_C], fits: Callable[[_C], bool], indifference: float = 0.0
) -> _C | None:
    """Return the fastest candidate that fits, or ``None`` if none does.

    Args:
        candidates: what to choose from; of equally fast ones that with the smaller bound is taken,
            and then the first.
        fits: whether a candidate can be taken, as far as memory goes.
        indifference: share of the time by which a further candidate must be able to be faster for
            its plan to be made. The one that is returned is the fastest but for that share.
    """
    best: _C | None = None
    for candidate in sorted(candidates, key=lambda candidate: candidate.least_time):
        if best is not None and candidate.least_time >= best.time * (1 - indifference):
            break
        if fits(candidate) and (best is None or candidate.time < best.time):
            best = candidate
    return best
