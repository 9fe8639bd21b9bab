"""A watch over long searches: it ends them when their time is up, and shows their progress.

A limit is one of time, or one of work. Work is counted in the seconds that it would take a usual
core, so a search that a limit of work ends has the same result on every machine.
"""

import sys
import time
from collections.abc import Callable
from math import inf
from typing import Final, TextIO

QUIET_SECONDS: Final = 2.0
"""Searches that take less show nothing."""
BETWEEN_LINES: Final = 20.0
"""Seconds between two lines where a line cannot be rewritten."""
_BETWEEN_REWRITES: Final = 0.2
_IN_MINUTES: Final = 180.0
"""Seconds from which a duration is shown in minutes."""
PLACEMENT: Final = 5e-6
"""Seconds of work to place a pass in a trial of a search (``shorten``)."""
PLANNED: Final = 30e-6
"""Seconds of work to lower a pass of a plan, to simulate it, and to add up its memory."""


class _Work:
    """The work of all searches of a watch and of the watches that were made from it.

    Attributes:
        seconds: that the work would take a usual core.
    """

    def __init__(self) -> None:
        self.seconds = 0.0


class Watch:
    """Knows when searches have to end, and shows their progress to a reader.

    Attributes:
        seconds: the limit of time or of work of all searches together; ``None``: there is none.
        counts_work: whether the limit is one of work.
        was_cut: whether a search was ended by the watch, so that a better plan may exist.
    """

    def __init__(
        self,
        seconds: float | None = None,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the time.

        Args:
            seconds: time for the searches; afterwards the best plan found so far is taken.
            stream: where the progress is written; ``None`` shows nothing. A terminal gets one line
                that is rewritten; any other stream gets a line now and then.
            clock: a clock in seconds.
        """
        self.seconds = seconds
        self.counts_work = False
        self.was_cut = False
        self._work, self._worked = _Work(), 0.0
        self._stream = stream
        self._clock = clock
        self._begun = self._search_begun = self._shown = clock()
        self._what = ""
        self._search, self._searches = 1, 1
        self._plan, self._plans = 0, 0
        self._unseen: list[str] = []
        self._rewrites = stream is not None and stream.isatty()
        self._line = False

    @classmethod
    def of_rank(cls, rank: int, seconds: float | None = None) -> "Watch":
        """Return a watch that shows the progress on rank 0 only."""
        return cls(seconds, sys.stderr if rank == 0 else None)

    def silence(self) -> None:
        """Show nothing from now on."""
        self._stream = None

    def again(self, seconds: float | None) -> "Watch":
        """Return a watch with ``seconds`` from now on, which writes to the same stream."""
        return self._beside(seconds, self._stream, counts_work=False)

    def counting(self, seconds: float | None) -> "Watch":
        """Return a watch with ``seconds`` of work from now on, which writes to the same stream."""
        return self._beside(seconds, self._stream, counts_work=True)

    def part(self, seconds: float) -> "Watch":
        """Return a silent watch over one of several searches; it ends no later than this watch."""
        least = min(seconds, self.left)
        return self._beside(None if least == inf else least, None, self.counts_work)

    def _beside(self, seconds: float | None, stream: TextIO | None, counts_work: bool) -> "Watch":
        """Return another watch over the same work."""
        found = Watch(seconds, stream, self._clock)
        found._work, found._worked = self._work, self._work.seconds
        found.counts_work = counts_work
        return found

    def did(self, seconds: float) -> None:
        """Note work that would take a usual core ``seconds``."""
        self._work.seconds += seconds

    @property
    def worked(self) -> float:
        """Seconds of work of all searches since this watch was made."""
        return self._work.seconds - self._worked

    @property
    def left(self) -> float:
        """Seconds of time or work that are left; infinite without a limit."""
        return inf if self.seconds is None else max(0.0, self.seconds - self._spent())

    @property
    def is_over(self) -> bool:
        """Whether the limit is reached; then the caller must end its search (see ``was_cut``)."""
        if self.seconds is None or self._spent() < self.seconds:
            return False
        self.was_cut = True
        return True

    @property
    def limit(self) -> str:
        """The limit in words, to follow "in" or "after"."""
        return f"work of about {self.seconds:g} s" if self.counts_work else f"{self.seconds:g} s"

    def _spent(self) -> float:
        """Return the seconds that count against the limit."""
        return self.worked if self.counts_work else self._clock() - self._begun

    def expect(self, plans: int) -> None:
        """Note that up to ``plans`` more plans are to be compared."""
        self._plans += plans

    def next_plan(self) -> None:
        """Note that the next of the expected plans is made now."""
        self._plan += 1

    def begin(self, what: str, search: int = 1, searches: int = 1) -> None:
        """Note that a search for the plan of a schedule begins.

        Args:
            what: the schedule.
            search: number of the search, from 1.
            searches: number of searches that the plan takes.
        """
        self._what, self._search, self._searches = what, search, searches
        self._search_begun = self._clock()
        self.show(0.0)

    def show(self, share: float, found: str = "") -> None:
        """Show the progress of the present search.

        Args:
            share: share of the search's trials that are made, if it finds no better plan from now
                on.
            found: a description of the best plan so far.
        """
        now = self._clock()
        due = _BETWEEN_REWRITES if self._rewrites else BETWEEN_LINES
        wait = due if self._shown > self._begun else QUIET_SECONDS
        if self._stream is None or now - self._shown < wait:
            return
        self._shown = now
        best = found and f", best so far: {found}"
        times = self._times(now, share)
        self._put(f"{self._where()}: {share:.0%} of its trials made{times}{best}")

    def planned(self, what: str, outcome: str) -> None:
        """Show a description of a plan that was made, as ``note`` does."""
        self.note(f"{what}{self._number()}: {outcome}")

    def note(self, line: str) -> None:
        """Show a line that stays, as soon as the searches have taken ``QUIET_SECONDS``."""
        self._unseen.append(line)
        if self._clock() - self._begun >= QUIET_SECONDS:
            self._put("")

    def close(self, consequence: str = "the best plan so far is taken") -> None:
        """End the watch; if it has cut a search short, show this and the consequence."""
        if self.was_cut:
            self._unseen.append(f"the search ends after {self.limit}: {consequence}")
        if self.was_cut or self._line:
            self._put("")

    def _where(self) -> str:
        """Return the text that names the present search."""
        search = f", search {self._search} of {self._searches}" if self._searches > 1 else ""
        return f"{self._what}{self._number()}{search}"

    def _number(self) -> str:
        """Return the text that numbers the present plan, if several are expected."""
        return f" ({self._plan} of at most {self._plans} plans)" if self._plans > 1 else ""

    def _times(self, now: float, share: float) -> str:
        """Return the text that estimates the time left, of the present search and of all plans."""
        if share <= 0:
            return ""
        begun, whole = self._search_begun, (now - self._search_begun) / share
        left = begun + whole - now
        said = f", about {_duration(self._within(left, now))} left"
        if self._plans <= self._plan:
            return said
        left += (self._searches - self._search) * whole
        mean = (now + left - self._begun) / self._plan
        every = self._within(left + mean * (self._plans - self._plan), now)
        return f"{said}, {_duration(every)} for all plans"

    def _within(self, seconds: float, now: float) -> float:
        """Return ``seconds``, or the time that is left if that is less, but no negative time.

        A search looks at the clock between its trials, so its last trial may end late.
        """
        if self.seconds is not None and not self.counts_work:
            seconds = min(seconds, self._begun + self.seconds - now)
        return max(0.0, seconds)

    def _put(self, line: str) -> None:
        """Write the lines not written yet, then ``line``, over a line that may be rewritten."""
        if self._stream is None:
            return
        if self._line:
            self._stream.write("\r\x1b[K")
        for unseen in self._unseen:
            self._stream.write(f"{unseen}\n")
        self._unseen.clear()
        self._line = self._rewrites and bool(line)
        if line:
            self._stream.write(line if self._rewrites else f"{line}\n")
        self._stream.flush()


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < _IN_MINUTES else f"{seconds / 60:.0f} min"
