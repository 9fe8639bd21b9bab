"""Find the fastest of several plans without making plans that cannot be the fastest."""

from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar


class HasTime(Protocol):
    """A plan that is compared with others; it is made when ``time`` is read for the first time."""

    @property
    def least_time(self) -> float:
        """Lower bound of ``time``, known without the plan."""

    @property
    def time(self) -> float:
        """Time of an iteration, in the unit of ``least_time``."""


_C = TypeVar("_C", bound=HasTime)


def fastest(
    candidates: Iterable[_C],
    fits: Callable[[_C], bool],
    indifference: float = 0.0,
    is_over: Callable[[], bool] = lambda: False,
    made: Callable[[_C], None] = lambda candidate: None,
) -> _C | None:
    """Return the fastest candidate that fits, or ``None`` if none does.

    Args:
        candidates: the candidates to choose from. If several are equally fast, the candidate with
            the smallest bound wins, then the first.
        fits: whether a candidate fits into the memory.
        indifference: a candidate's plan is made only if its bound is below the best time so far by
            more than this share. No candidate is faster than the returned candidate by more than
            this share.
        is_over: whether the time is up. If it is, and a plan that fits has been found, no further
            plan is made.
        made: called for each candidate whose plan has been made.
    """
    best: _C | None = None
    for candidate in sorted(candidates, key=lambda candidate: candidate.least_time):
        if best is not None and candidate.least_time >= best.time * (1 - indifference):
            break
        if best is not None and is_over():
            break
        made(candidate)
        if fits(candidate) and (best is None or candidate.time < best.time):
            best = candidate
    return best
