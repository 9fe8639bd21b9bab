"""Which of the schedules that ``auto`` compares it takes.

Without a GPU they are compared by their plans, and a bound in FLOPs spares most of them. On a GPU
bounds in seconds are closer together, so ``race`` compares by plans of few microbatches too.
"""

from collections.abc import Sequence

from megatron.schedules.search.fastest import fastest
from megatron.training.planning.candidate import Candidate
from megatron.training.planning.race import NEAR, Race


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


def chosen(compared: Sequence[Candidate], seconds: float | None = None) -> Candidate:
    """Return the candidate that ``auto`` takes.

    It is within the memory limit, and is the fastest such candidate or within ``NEAR`` of it. On a
    GPU it fits the memory too, if any does, and holds the least of those within ``NEAR``. If none
    fits, it is the one that holds the least.

    Args:
        compared: the candidates.
        seconds: time of the comparison on a GPU, unless the watch of the candidates has a limit of
            its own. The search for the plan that is taken may last longer.

    Raises:
        ValueError: no schedule is within the limit.
    """
    best = _by_seconds(compared, seconds) if compared[0].gpu else _by_costs(compared)
    if best is not None:
        return best
    within = [each for each in compared if each.is_planned and each.is_within_limit]
    if within:
        return min(within, key=lambda candidate: candidate.peak)
    least = min(compared, key=lambda candidate: candidate.in_flight)
    raise ValueError(
        f"--zero-bubble-max-pending-backward {least.limit:g} is too few for every schedule: "
        f"the least is {least.in_flight:g}, with {least.schedule}"
    )


def _by_costs(compared: Sequence[Candidate]) -> Candidate | None:
    return fastest(
        compared,
        lambda candidate: candidate.fits,
        NEAR,
        is_over=lambda: any(candidate.watch.is_over for candidate in compared),
        made=Candidate.tell,
    )


def _by_seconds(compared: Sequence[Candidate], seconds: float | None) -> Candidate | None:
    watch = compared[0].watch
    if watch.seconds is not None:
        seconds = None
    comparing = watch if seconds is None else watch.again(seconds)
    able = [candidate for candidate in compared if candidate.can_fit]
    race = Race(able or compared, comparing)
    best = race.winner()
    if seconds is not None:
        comparing.close(race.consequence())
    return best
