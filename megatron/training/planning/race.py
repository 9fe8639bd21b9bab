"""Which of the schedules that ``auto`` compares it takes, of which it plans as few as possible.

Without a GPU they are compared by their plans, and a bound in FLOPs spares most of them. On a GPU
bounds in seconds are closer together, so the schedules race. Three things tell the seconds of one:
a lower bound, which is known at once; a plan of few microbatches (``estimate``), which takes up to
some seconds; and its own plan, which takes several times as long. The schedule that looks fastest
by what is known of it is always looked at more closely, until the fastest by its own plan is ahead
of all that the others are expected to be.

An estimate may be off. One that is too low costs a plan and misleads nobody. One that is too high
hides a faster schedule, so all that are expected to be faster at all are planned. The schedule that
is taken is then within ``NEAR`` of the fastest if no estimate is too high by more than that.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from megatron.schedules.counted import counted
from megatron.schedules.search.fastest import fastest
from megatron.schedules.search.watch import Watch
from megatron.simulator.units import MEMORY, TIME
from megatron.training.planning.candidate import Candidate
from megatron.training.planning.estimate import Estimate, planned_microbatches

NEAR: Final = 0.01
"""Share of the time that a further schedule must be able to save for ``auto`` to look at it.

Searches take seconds. With vocab-2 ``auto`` mostly plans zb-v first, which idles so little that no
search is needed. On a GPU, ``auto`` takes the plan that holds the least of those within this share
of the fastest."""


def chosen(compared: Sequence[Candidate], seconds: float | None = None) -> Candidate:
    """Return the candidate that ``auto`` takes.

    It is within the memory limit, and is the fastest such candidate or within ``NEAR`` of it. On a
    GPU it fits the memory too, if any does, and holds the least of those within ``NEAR``. If none
    fits, it is the one that holds the least.

    ``seconds`` are those of the comparison on a GPU, unless the watch of the candidates has a limit
    of its own. The search for the plan that is taken may last longer.

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


@dataclass
class _Runner:
    """A candidate and what is known of it.

    There may be an estimate by a plan of few microbatches, or its own plan.
    """

    candidate: Candidate
    estimate: Estimate | None = None
    is_done: bool = False

    @property
    def seconds(self) -> float:
        """The best that is known of its time."""
        least = self.candidate.least_time
        if self.is_done:
            return self.candidate.time
        return least if self.estimate is None else max(self.estimate.seconds, least)

    @property
    def peak(self) -> float:
        """The best that is known of its bytes; 0 if nothing is."""
        if self.is_done:
            return self.candidate.peak
        return 0.0 if self.estimate is None else self.estimate.fullest.peak

    @property
    def expected_peak(self) -> float:
        """Bytes by the estimate, to be compared with those of other estimates."""
        return self.peak if self.estimate is None else self.estimate.fullest.peak

    @property
    def fits(self) -> bool:
        """Whether it fits, as far as is known."""
        if self.is_done:
            return self.candidate.fits
        found = self.estimate
        return found is None or (found.fits and found.in_flight <= self.candidate.limit)

    def look(self, comparing: Watch) -> None:
        """Look at it more closely; a plan of few microbatches must be less than its own plan."""
        request = self.candidate.request
        has_few = planned_microbatches(request) == request.microbatches
        if self.estimate is not None or self.candidate.is_planned or has_few:
            self.plan()
            return
        part = comparing.part(comparing.left)
        found = self.estimate = self.candidate.estimate(part, quick=True)
        fault = "" if self.fits else ": too much"
        self.candidate.watch.note(
            f"{self.candidate.schedule} {self.candidate.treatment}: by "
            f"{counted(found.planned, 'microbatch')} {TIME.write(found.seconds)} and "
            f"{MEMORY.write(found.fullest.peak)} are expected{fault}"
        )

    def plan(self) -> None:
        """Make its own plan."""
        self.candidate.tell()
        self.is_done = True


class Race:
    """A comparison of schedules by their seconds."""

    def __init__(self, candidates: Sequence[Candidate], comparing: Watch) -> None:
        """Begin with the bounds of candidates on one kind of GPU.

        When the time of ``comparing`` is over, no further schedule is looked at if one fits.
        """
        self._comparing = comparing
        runners = [_Runner(candidate) for candidate in candidates]
        self._runners = sorted(runners, key=lambda runner: runner.seconds)

    def winner(self) -> Candidate | None:
        """Return the schedule to take; ``None`` if none fits, and then the smallest is planned.

        Of the schedules within ``NEAR`` of the fastest it is the one that holds the least.
        """
        while (runner := self._next()) is not None:
            runner.look(self._comparing)
        best = self._fastest()
        if best is None:
            self._plan_smallest()
            best = self._fastest()
        return None if best is None else self._smallest_near(best)

    def consequence(self) -> str:
        """Return what it means that the time of the comparison is up."""
        unknown = [each.candidate for each in self._runners if not self._is_known(each)]
        named = ", ".join(f"{each.schedule} with {each.treatment}" for each in unknown)
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
        """Whether no more needs to be known of a schedule to leave it."""
        best = self._fastest()
        beaten = best is not None and self._is_beaten(runner, best)
        return runner.is_done or runner.estimate is not None or beaten

    @staticmethod
    def _is_beaten(runner: _Runner, best: _Runner) -> bool:
        """Whether a schedule is expected to be no faster, or cannot be faster by ``NEAR``."""
        margin = NEAR if runner.estimate is None else 0.0
        return runner.seconds >= best.seconds * (1 - margin)

    def _plan_smallest(self) -> None:
        """Plan schedules until none is expected to hold less than the smallest that is planned."""
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
        """Return the smallest planned schedule than which none is faster by ``NEAR``.

        One more is planned if it is expected to be as near and to hold less. Schedules without a
        plan count with what is known of their time.
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
