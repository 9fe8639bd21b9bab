"""What a run leaves to its plan: which alternatives are looked at, and which candidate is taken.

To look at an alternative is to bound its memory and time. The work of a comparison is limited, so
some alternatives are not looked at. If no plan of the others fits, further alternatives are looked
at while work is left. A message names the alternatives that are not looked at.
"""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final

from megatron.planning.candidate import BOUND, Candidate
from megatron.planning.compared import completed
from megatron.planning.race import fitting, smallest
from megatron.run.run_config import RunConfig
from megatron.schedules.counted import counted
from megatron.schedules.search.watch import Watch

_NAMED: Final = 5
"""Alternatives that a message of one line names."""


class Compared:
    """The alternatives that a run leaves to its plan, as far as they have been looked at.

    Attributes:
        candidates: the one candidate that a run asks for, or all that ``auto`` compares.
        left_out: the alternatives that cannot be planned, each with the reason.
    """

    def __init__(
        self,
        runs: Sequence[RunConfig],
        candidates_of: Callable[[RunConfig], list[Candidate]],
        watch: Watch,
    ) -> None:
        """Take the runs with each of the alternatives, in the order in which to look at them.

        Args:
            runs: these runs; a run that leaves nothing to its plan, alone.
            candidates_of: returns the candidates of one of them. It raises a ``ValueError`` if
                there are none.
            watch: limits the time of the search, and shows how far the search is.
        """
        self.candidates: list[Candidate] = []
        self.left_out: list[str] = []
        self._waiting = list(runs)
        self._candidates_of = candidates_of
        self._watch = self._looking = self._whole = watch
        self._faults: list[ValueError] = []

    @property
    def untried(self) -> list[str]:
        """The words of the alternatives that are not looked at."""
        return [_words(run) for run in self._waiting]

    def look(self, least: int, seconds: float | None = None) -> None:
        """Look at alternatives for half of the limit, or for all of it if none so far can fit.

        Args:
            least: alternatives that are looked at in any case; the first always is.
            seconds: the limit in seconds of work, if the watch has no limit.

        Raises:
            ValueError: no alternative can be planned; the error is that of the first.
        """
        own = self._watch.seconds
        if own is None:
            self._looking = self._watch.counting(None if seconds is None else seconds / 2)
        else:
            self._looking = self._watch.again(own / 2)
        self._whole = self._with_limit(seconds)
        for number in range(len(self._waiting)):
            if number >= max(1, least) and self._is_enough():
                break
            self._look_at_next()
        if not self.candidates:
            raise self._faults[0]

    def choose(self, seconds: float | None = None) -> Candidate:
        """Return the candidate that ``auto`` takes, by the rules of ``race.chosen``.

        A candidate that can fit by its bound may have no plan that fits. So if no plan fits, the
        next alternatives are looked at, one by one, until one of them has a plan that fits or the
        limit is reached. On a GPU, candidates that the race has not planned, and that could be
        better than the chosen one, are planned then, and the choice is made once more.

        Args:
            seconds: of work to plan the candidates that ``look`` has found, as much again for
                further alternatives, and as much again for the last step, if the watch has no
                limit.

        Raises:
            ValueError: no candidate is within the limit of microbatches in flight.
        """
        best = fitting(self.candidates, seconds)
        further = self._with_limit(seconds)
        if best is None and self._waiting and not further.is_over:
            self._watch.note("no plan so far fits: further alternatives of auto are looked at")
        while best is None and self._waiting and not further.is_over:
            if able := [each for each in self._look_at_next() if each.can_fit]:
                self._watch.expect(len(able))
                best = fitting(able, seconds)
        if self._waiting:
            (self._looking if best else further).close(self._left())
        if best is None:
            return smallest(self.candidates)
        if best.gpu is None:
            return best
        return completed(best, self.candidates, self._with_limit(seconds), every=False).taken

    def _with_limit(self, seconds: float | None) -> Watch:
        """Return the watch if it has a limit, else a watch over ``seconds`` of work from now on."""
        return self._watch if self._watch.seconds is not None else self._watch.counting(seconds)

    def _left(self) -> str:
        """Return the message that names some of the alternatives that are not looked at."""
        left = self.untried
        more = [f"{len(left) - _NAMED} more"] * (len(left) > _NAMED)
        names = "; ".join([*islice(left, _NAMED), *more])
        return f"{counted(len(left), 'alternative')} of auto not looked at: {names}"

    def _look_at_next(self) -> list[Candidate]:
        run = self._waiting.pop(0)
        try:
            found = self._candidates_of(run)
        except ValueError as error:
            self._faults.append(error)
            self.left_out.append(f"{_words(run)} ({error})")
            self._watch.note(f"left out: {self.left_out[-1]}")
            return []
        self._watch.did(BOUND * len(found))
        self.candidates += found
        return found

    def _is_enough(self) -> bool:
        """Whether enough alternatives are looked at: for half of the limit if some plan may fit.

        The bounds of candidates are computed here, so that a limit of time has their time too.
        """
        bounds = [each.least_time for each in self.candidates if each.can_fit]
        return self._looking.is_over and (bool(bounds) or self._whole.is_over)


def _words(run: RunConfig) -> str:
    return ", ".join(run.taken)
