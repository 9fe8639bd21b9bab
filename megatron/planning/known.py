"""What is known of the time and memory of a run, and which of several runs is taken by that."""

from collections.abc import Callable, Iterable
from math import inf
from typing import Final, Literal, NamedTuple, Protocol, TypeVar

from megatron.planning.run_memory import Fullest

NEAR: Final = 0.01
"""Runs whose times differ by less than this share are as fast: of these the smallest is taken.

A search looks at a further run only if the run might save this share of the time. Searches take
seconds. With vocab-2 ``auto`` mostly plans zb-v first, which idles so little that no search is
needed."""

Level = Literal["bound", "unsearched", "estimate", "plan"]
"""Where the seconds and bytes of a run come from.

bound: lower bounds, known without a plan; the time of F counts in pairs with B, if a search of
edits looks at a run with pairs. unsearched: a plan of few microbatches with many passes or with
pairs, in the order of its block. estimate: a plan of few microbatches. plan: the whole plan.
"""


class Known(NamedTuple):
    """What is known of a run.

    Attributes:
        level: where the figures come from.
        seconds: of an iteration.
        held: the fullest rank.
        fits: whether every rank has enough memory.
        planned: microbatches of the plan from which the figures follow; 0: there is no plan.
    """

    level: Level
    seconds: float
    held: Fullest
    fits: bool
    planned: int = 0


class HasKnown(Protocol):
    """A run of which something is known."""

    @property
    def known(self) -> Known:
        """What the closest look so far has found."""


_R = TypeVar("_R", bound=HasKnown)


def costs(run: HasKnown) -> tuple[float, float]:
    """Return the seconds and the bytes of a run; the lowest are those of the fastest."""
    return run.known.seconds, run.known.held.peak


def best_known(
    runs: Iterable[_R],
    reluctance: Callable[[_R], float] = lambda run: 0.0,
    rivals: Iterable[HasKnown] = (),
) -> _R | None:
    """Return the run to take: of all within ``NEAR`` of the fastest, the one that holds the least.

    So no other of the runs is both faster and smaller than the result.

    Args:
        runs: runs that fit.
        reluctance: the runs with the least of it come first, whatever they hold.
        rivals: runs that may be the fastest, but are not taken.
    """
    able = list(runs)
    times = [run.known.seconds for run in able] + [run.known.seconds for run in rivals]
    fastest = min(times, default=inf)
    near = (run for run in able if run.known.seconds * (1 - NEAR) <= fastest)
    return min(near, key=lambda run: (reluctance(run), *costs(run)[::-1]), default=None)
