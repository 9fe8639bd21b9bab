"""Which of the schedules that ``auto`` compares it takes."""

from collections.abc import Sequence
from typing import Final

from megatron.schedules.search.fastest import fastest
from megatron.training.planning.candidate import Candidate

NEAR: Final = 0.01
"""Share of the time that a further schedule must be able to save for ``auto`` to plan it.

Searches take seconds. With vocab-2 ``auto`` mostly plans zb-v first, which idles so little that no
search is needed. On a GPU, ``auto`` takes the plan that holds the least of those within this share
of the fastest."""


def ranking(compared: Sequence[Candidate]) -> list[Candidate]:
    """Return all schedules with their plans, in the order of preference.

    First comes the schedule that ``auto`` takes, then the others that fit, then those that do not
    fit; the others and the rest are each sorted by time. Those that are not planned when the time
    of the search is up are left out.

    Raises:
        ValueError: no schedule is within the memory limit.
    """
    return ranked(chosen(compared), compared)


def ranked(first: Candidate, compared: Sequence[Candidate]) -> list[Candidate]:
    """Return ``ranking``, of which the first is known."""
    others = [candidate for candidate in compared if candidate is not first]
    for candidate in sorted(others, key=lambda candidate: candidate.least_time):
        if not candidate.is_planned and not candidate.watch.is_over:
            candidate.tell()
    planned = [candidate for candidate in others if candidate.is_planned]
    return [first, *sorted(planned, key=lambda candidate: (not candidate.fits, candidate.time))]


def chosen(compared: Sequence[Candidate]) -> Candidate:
    """Return the candidate that ``auto`` takes.

    It is within the memory limit, and is the fastest such candidate or within ``NEAR`` of it. On a
    GPU it fits the memory too, if any does, and holds the least of those within ``NEAR``. If none
    fits, it is the one that holds the least.

    Raises:
        ValueError: no schedule is within the limit.
    """
    able = [candidate for candidate in compared if candidate.can_fit]
    best = fastest(
        able or compared,
        lambda candidate: candidate.fits,
        NEAR,
        is_over=lambda: any(candidate.watch.is_over for candidate in compared),
        made=Candidate.tell,
    )
    if best is not None:
        return best if best.pricing is None else _smallest_near(best, able)
    within = [each for each in compared if each.is_planned and each.is_within_limit]
    if within:
        return min(within, key=lambda candidate: candidate.peak)
    least = min(compared, key=lambda candidate: candidate.in_flight)
    raise ValueError(
        f"--zero-bubble-max-pending-backward {least.limit:g} is too few for every schedule: "
        f"the least is {least.in_flight:g}, with {least.schedule}"
    )


def _smallest_near(best: Candidate, able: Sequence[Candidate]) -> Candidate:
    """Return the candidate that holds the least of those than which none is faster by ``NEAR``.

    Candidates without a plan count with their bounds, so that the promise holds for their plans.
    """
    others = [each.least_time for each in able if not each.is_planned]
    planned = [each for each in able if each.is_planned and each.fits]
    bound = min([each.time for each in planned] + others)
    near = [each for each in planned if each.time * (1 - NEAR) <= bound]
    return min(near, key=lambda each: each.peak, default=best)
