"""Chooses one of the schedules that ``auto`` compares, with as few plans as possible.

Without a GPU, schedules are compared by their plans; lower bounds in FLOPs spare most of the plans.
On a GPU, the lower bounds in seconds are closer together, so the schedules race. The seconds of a
schedule have three sources: a lower bound, which is known at once; a plan of few microbatches
(``estimate``), which takes up to some seconds to make; and the schedule's own plan, which takes
several times as long. The race always looks more closely at the schedule that seems fastest so far.
It ends when the schedule that is fastest by its own plan is ahead of all other expected times.

An estimate may be off. An estimate that is too low costs a plan and misleads nobody. An estimate
that is too high hides a faster schedule, so every schedule that is expected to be faster at all is
planned. The chosen schedule is then within ``NEAR`` of the fastest, provided that no estimate is
too high by more than ``NEAR``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from megatron.planning.candidate import Candidate
from megatron.planning.estimate import Estimate, planned_microbatches
from megatron.schedules.counted import counted
from megatron.schedules.search.fastest import fastest
from megatron.schedules.search.watch import Watch
from megatron.simulator.units import MEMORY, TIME

NEAR: Final = 0.01
"""``auto`` looks at a further schedule only if the schedule might save this share of the time.

Searches take seconds. With vocab-2 ``auto`` mostly plans zb-v first, which idles so little that no
search is needed. On a GPU, ``auto`` considers all plans within this share of the fastest plan, and
takes the plan that holds the least."""


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
    return _by_seconds(compared, seconds) if compared[0].gpu else _by_costs(compared)


def best_planned(planned: Sequence[Candidate]) -> Candidate | None:
    """Return the candidate that fits and holds the least of all within ``NEAR`` of the fastest.

    Only planned candidates count, so no row of a table with all of them is both faster and smaller
    than the result. Without a candidate that fits, the result is ``None``.
    """
    fitting = [each for each in planned if each.is_planned and each.fits]
    fastest = min((each.time for each in fitting), default=0.0)
    near = [each for each in fitting if each.time * (1 - NEAR) <= fastest]
    return min(near, key=lambda each: (each.peak, each.time), default=None)


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
    comparing = watch if seconds is None else watch.counting(seconds)
    able = [candidate for candidate in compared if candidate.can_fit]
    race = Race(able or compared, comparing)
    best = race.winner()
    if seconds is not None:
        comparing.close(race.consequence())
    return best


@dataclass
class _Runner:
    """A candidate of the race.

    Attributes:
        candidate: the candidate.
        estimate: by a plan of few microbatches; ``None``: it is not made yet.
        is_done: whether the candidate's own plan is made.
    """

    candidate: Candidate
    estimate: Estimate | None = None
    is_done: bool = False

    @property
    def seconds(self) -> float:
        """The candidate's time by its plan, else by its estimate, else by its lower bound."""
        least = self.candidate.least_time
        if self.is_done:
            return self.candidate.time
        return least if self.estimate is None else max(self.estimate.seconds, least)

    @property
    def peak(self) -> float:
        """The candidate's bytes by its plan, else by its estimate, else 0."""
        if self.is_done:
            return self.candidate.peak
        return 0.0 if self.estimate is None else self.estimate.fullest.peak

    @property
    def expected_peak(self) -> float:
        """The candidate's bytes by its estimate, else ``peak``, to compare estimates with."""
        return self.peak if self.estimate is None else self.estimate.fullest.peak

    @property
    def fits(self) -> bool:
        """Whether the candidate fits, as far as is known."""
        if self.is_done:
            return self.candidate.fits
        found = self.estimate
        return found is None or (found.fits and found.in_flight <= self.candidate.limit)

    def look(self, comparing: Watch) -> None:
        """Make the estimate, or the candidate's own plan if an estimate would not save time.

        An estimate saves no time if it is already made, if the own plan is already made, or if the
        own plan has no more microbatches than the estimate.
        """
        request = self.candidate.request
        has_few = planned_microbatches(request) == request.microbatches
        if self.estimate is not None or self.candidate.is_planned or has_few:
            self.plan()
            return
        part = comparing.part(comparing.left)
        found = self.estimate = self.candidate.estimate(part, quick=True)
        fault = "" if self.fits else ": too much"
        self.candidate.watch.note(
            f"{self.candidate.named}: by "
            f"{counted(found.planned, 'microbatch')} {TIME.write(found.seconds)} and "
            f"{MEMORY.write(found.fullest.peak)} are expected{fault}"
        )

    def plan(self) -> None:
        """Make the candidate's own plan."""
        self.candidate.tell()
        self.is_done = True


class Race:
    """A comparison of schedules by their seconds."""

    def __init__(self, candidates: Sequence[Candidate], comparing: Watch) -> None:
        """Order candidates on one kind of GPU by their lower bounds.

        When ``comparing`` is over, the race ends if a planned schedule fits.
        """
        self._comparing = comparing
        runners = [_Runner(candidate) for candidate in candidates]
        self._runners = sorted(runners, key=lambda runner: runner.seconds)

    def winner(self) -> Candidate | None:
        """Return the schedule that holds the least among all within ``NEAR`` of the fastest.

        If no schedule fits, the smallest schedule is planned, and the result is ``None``.
        """
        while (runner := self._next()) is not None:
            runner.look(self._comparing)
        best = self._fastest()
        if best is None:
            self._plan_smallest()
            best = self._fastest()
        return None if best is None else self._smallest_near(best)

    def consequence(self) -> str:
        """Return the message that the time is up, with the schedules that were not compared."""
        unknown = [each.candidate for each in self._runners if not self._is_known(each)]
        named = "; ".join(each.named for each in unknown)
        rest = f"not compared: {named}; " if unknown else ""
        return f"the best schedule so far is taken; {rest}--search-seconds N gives more time"

    @property
    def _done(self) -> list[_Runner]:
        return [runner for runner in self._runners if runner.is_done]

    def _fastest(self) -> _Runner | None:
        fitting = [runner for runner in self._done if runner.fits]
        return min(fitting, key=lambda runner: runner.seconds, default=None)

    def _next(self) -> _Runner | None:
        """Return the schedule to look at; ``None`` when enough is known."""
        able = [each for each in self._runners if not each.is_done and each.fits]
        runner = min(able, key=lambda runner: runner.seconds, default=None)
        best = self._fastest()
        if best is not None and runner is not None:
            beaten = self._is_beaten(runner, best)
            return None if beaten or self._comparing.is_over else runner
        if runner is not None and self._comparing.is_over:
            seen = [each for each in able if each.estimate is not None]
            return min(seen, key=lambda runner: runner.seconds, default=runner)
        return runner

    def _is_known(self, runner: _Runner) -> bool:
        """Whether enough is known of a schedule to look at it no further."""
        best = self._fastest()
        beaten = best is not None and self._is_beaten(runner, best)
        return runner.is_done or runner.estimate is not None or beaten

    @staticmethod
    def _is_beaten(runner: _Runner, best: _Runner) -> bool:
        """Whether ``runner`` is no faster by its estimate, or saves at most ``NEAR`` by its bound.

        ``NEAR`` is a share of the time of ``best``.
        """
        margin = NEAR if runner.estimate is None else 0.0
        return runner.seconds >= best.seconds * (1 - margin)

    def _plan_smallest(self) -> None:
        """Plan schedules until none is expected to hold less than the smallest planned schedule."""
        while True:
            done = [runner.peak for runner in self._done]
            waiting = [runner for runner in self._runners if not runner.is_done]
            runner = min(waiting, key=lambda runner: runner.peak, default=None)
            if runner is None or (done and min(done) <= runner.peak):
                return
            runner.plan()
            if self._comparing.is_over or runner.fits:
                return

    def _smallest_near(self, best: _Runner) -> Candidate:
        """Return the planned schedule that holds the least of all within ``NEAR`` of the fastest.

        Before that, one more schedule is planned if its estimate is as near and holds less. The
        fastest may have no plan: then its estimate or its lower bound counts as its time.
        """
        fastest = min(each.seconds for each in self._runners if each.fits)

        def near() -> list[_Runner]:
            fitting = (each for each in self._runners if each.fits)
            return [each for each in fitting if each.seconds * (1 - NEAR) <= fastest]

        expected = [each for each in near() if each.estimate is not None]
        smallest = min(expected, key=lambda runner: runner.expected_peak, default=best)
        less = smallest.expected_peak < best.expected_peak * (1 - NEAR)
        if less and not smallest.is_done and not self._comparing.is_over:
            smallest.plan()
        planned = [each for each in near() if each.is_done]
        return min(planned, key=lambda runner: runner.peak, default=best).candidate
