"""Find the best of several runs without a close look at all of them.

This is the loop of every search for a run, a schedule or a plan; ``planning/search`` says more.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

_T = TypeVar("_T")


def look_closer(
    waiting: Callable[[], Iterable[_T]],
    price: Callable[[_T], tuple[float, ...]],
    is_enough: Callable[[_T], bool],
    look: Callable[[_T], object],
) -> None:
    """Look more closely at whoever seems best, again and again, until enough is known.

    Args:
        waiting: returns those of which a closer look would tell more.
        price: what one seems to cost by all that is known; of equal prices the first counts.
        is_enough: whether no closer look is worth its work, if this one seems best of all that
            wait.
        look: takes a closer look at one, after which it has another price or waits no longer.
    """
    while (first := min(waiting(), key=price, default=None)) is not None:
        if is_enough(first):
            return
        look(first)


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
    waiting = deque(sorted(candidates, key=lambda candidate: candidate.least_time))
    best: _C | None = None

    def is_enough(first: _C) -> bool:
        if best is None:
            return False
        return first.least_time >= best.time * (1 - indifference) or is_over()

    def plan(first: _C) -> None:
        nonlocal best
        made(waiting.popleft())
        if fits(first) and (best is None or first.time < best.time):
            best = first

    look_closer(lambda: waiting, lambda candidate: (candidate.least_time,), is_enough, plan)
    return best
