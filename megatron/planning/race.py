"""Chooses one of the candidates that ``auto`` compares, with as few plans as possible.

The time of a candidate is known in three steps, each of which takes several times as long as the
one before: a lower bound, a plan of few microbatches, and its own plan. By FLOPs, without a GPU,
there is no second step. The race always looks more closely at the candidate that seems fastest so
far. It ends when the candidate that is fastest by its own plan is ahead of all other expected
times.

An estimate may be off. An estimate that is too low costs a plan and misleads nobody. An estimate
that is too high hides a faster candidate, so every candidate that is expected to be faster at all
is planned. The chosen candidate is then within ``NEAR`` of the fastest, provided that no estimate
is too high by more than ``NEAR``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from megatron.planning.candidate import Candidate
from megatron.planning.known import NEAR, best_known, costs
from megatron.schedules.search.fastest import look_closer
from megatron.schedules.search.watch import Watch


def chosen(compared: Sequence[Candidate], seconds: float | None = None) -> Candidate:
    """Return the candidate that ``auto`` takes.

    The candidate is within the limit of microbatches in flight. Among such candidates it is the
    fastest, or within ``NEAR`` of the fastest. On a GPU it must also fit the memory, and it holds
    the least of all candidates within ``NEAR``. If no candidate fits the memory, the candidate that
    holds the least is returned.

    ``seconds`` of work limit the comparison on a GPU (``Watch.counting``). If the watch of the
    candidates has a limit, that limit holds instead. The search for the plan that is taken may last
    longer.

    Raises:
        ValueError: no schedule is within the limit.
    """
    best = fitting(compared, seconds)
    return smallest(compared) if best is None else best


def fitting(compared: Sequence[Candidate], seconds: float | None = None) -> Candidate | None:
    """Return the candidate that ``chosen`` takes if some candidate fits, else ``None``."""
    watch = compared[0].watch
    if watch.seconds is not None or compared[0].gpu is None:
        seconds = None
    comparing = watch if seconds is None else watch.counting(seconds)
    able = [candidate for candidate in compared if candidate.can_fit]
    race = Race(able or compared, comparing)
    best = race.winner()
    if seconds is not None:
        comparing.close(race.consequence())
    return best


def smallest(compared: Sequence[Candidate]) -> Candidate:
    """Return the planned candidate within the limit that holds the least.

    Raises:
        ValueError: no candidate is within the limit.
    """
    within = [each for each in compared if each.is_planned and each.is_within_limit]
    if within:
        return min(within, key=lambda candidate: candidate.peak)
    if (reason := _beyond_memory(compared)) is not None:
        raise ValueError(reason)
    least = min(compared, key=lambda candidate: candidate.in_flight)
    raise ValueError(
        f"--zero-bubble-max-pending-backward {least.limit:g} is too few for every schedule: "
        f"the least is {least.in_flight:g}, with {least.named if least.others else least.schedule}"
    )


def _beyond_memory(compared: Sequence[Candidate]) -> str | None:
    """Return the reason why all plans exceed the limit by memory, if the run has one.

    The plan that holds the least tells it.
    """
    if not compared[0].config.parallel.planning.is_limited_by_memory:
        return None
    planned = [each for each in compared if each.is_planned] or compared
    return min(planned, key=lambda candidate: candidate.peak).beyond_limit


@dataclass(frozen=True)
class Race:
    """A comparison of candidates by their time.

    Attributes:
        candidates: the candidates.
        watch: when it is over, the race ends if a planned candidate fits.
    """

    candidates: Sequence[Candidate]
    watch: Watch

    def winner(self) -> Candidate | None:
        """Return the candidate that holds the least among all within ``NEAR`` of the fastest.

        If no candidate fits, the smallest is planned, and the result is ``None``.
        """
        look_closer(self._waiting, costs, self._is_enough, self._look)
        look_closer(self._to_take, costs, self._is_late, lambda first: first.tell())
        return best_known(self._fitting("plan"), rivals=self._fitting()) or self._fastest()

    def consequence(self) -> str:
        """Return the message that the time is up, with the candidates that were not compared."""
        best = self._best_seconds()
        bounded = (each for each in self.candidates if each.known.level == "bound")
        named = "; ".join(each.named for each in bounded if not _is_beaten(each, best))
        rest = f"not compared: {named}; " if named else ""
        return f"the best schedule so far is taken; {rest}--search-seconds N gives more time"

    def _fitting(self, *levels: str) -> list[Candidate]:
        """Return the candidates that fit as far as is known, perhaps those at some levels."""
        return [
            each
            for each in self.candidates
            if (not levels or each.known.level in levels)
            and (each.known.level == "bound" or each.known.fits)
        ]

    def _fastest(self) -> Candidate | None:
        return min(self._fitting("plan"), key=lambda each: each.known.seconds, default=None)

    def _best_seconds(self) -> float:
        best = self._fastest()
        return inf if best is None else best.known.seconds

    def _waiting(self) -> list[Candidate]:
        """Return the candidates that may fit, and are not planned.

        If the time is up before any plan fits, those with estimates are returned, if there are any.
        """
        waiting = sorted(self._fitting("bound", "estimate"), key=lambda each: each.least_time)
        if waiting and self._fastest() is None and self.watch.is_over:
            return [each for each in waiting if each.known.level == "estimate"] or waiting
        return waiting

    def _is_enough(self, first: Candidate) -> bool:
        best = self._best_seconds()
        return best < inf and (_is_beaten(first, best) or self.watch.is_over)

    def _is_late(self, first: Candidate) -> bool:
        """Whether the time is up and there is a plan, so that ``first`` needs none."""
        return any(each.is_planned for each in self.candidates) and self.watch.is_over

    def _look(self, candidate: Candidate) -> None:
        candidate.look(self.watch)

    def _to_take(self) -> list[Candidate]:
        """Return the candidate to take by plans and estimates, if it is not planned.

        If no plan fits, the smallest candidate takes its place.
        """
        best: Candidate | None = min(
            self.candidates, key=lambda each: (each.known.held.peak, not each.is_planned)
        )
        if self._fastest() is not None:
            best = best_known(self._fitting("estimate", "plan"), rivals=self._fitting())
        return [] if best is None or best.is_planned else [best]


def _is_beaten(candidate: Candidate, best: float) -> bool:
    """Whether a candidate is no faster than ``best`` by its estimate, or hardly by its bound.

    A bound must save ``NEAR`` of the seconds ``best``.
    """
    margin = NEAR if candidate.known.level == "bound" else 0.0
    return candidate.known.seconds >= best * (1 - margin)
