"""A watch over long searches: it ends them when their time is up, and shows how far they are."""

import sys
import time
from collections.abc import Callable
from typing import Final, TextIO

QUIET_SECONDS: Final = 2.0
"""Searches that take less show nothing."""
BETWEEN_LINES: Final = 20.0
"""Seconds between two lines where a line cannot be rewritten."""
_BETWEEN_REWRITES: Final = 0.2


class Watch:
    """Knows when searches have to end, and tells a reader how far they are.

    Attributes:
        seconds: how long the searches may take all together; ``None`` for as long as they like.
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
            seconds: time for the searches; what is found when it is over is taken.
            stream: what is shown goes there; ``None`` shows nothing. A terminal gets one line that
                is rewritten, anything else a line now and then.
            clock: a clock in seconds.
        """
        self.seconds = seconds
        self.was_cut = False
        self._stream = stream
        self._clock = clock
        self._begun = self._search_begun = self._shown = clock()
        self._what = ""
        self._unseen: list[str] = []
        self._rewrites = stream is not None and stream.isatty()
        self._line = False

    @classmethod
    def of_rank(cls, rank: int, seconds: float | None = None) -> "Watch":
        """Return a watch that shows on rank 0 what the searches do."""
        return cls(seconds, sys.stderr if rank == 0 else None)

    def again(self) -> "Watch":
        """Return a watch with the same time from now on, and the same reader."""
        return Watch(self.seconds, self._stream, self._clock)

    @property
    def is_over(self) -> bool:
        """Whether the time is up; whoever asks ends a search because of it."""
        if self.seconds is None or self._clock() - self._begun < self.seconds:
            return False
        self.was_cut = True
        return True

    def begin(self, what: str) -> None:
        """Note that a search for ``what`` begins."""
        self._what = what
        self._search_begun = self._clock()
        self.show(0.0)

    def show(self, share: float, found: str = "") -> None:
        """Show how far the present search is.

        Args:
            share: share of its effort that is spent.
            found: what it has found so far.
        """
        now = self._clock()
        due = _BETWEEN_REWRITES if self._rewrites else BETWEEN_LINES
        wait = due if self._shown > self._begun else QUIET_SECONDS
        if self._stream is None or now - self._shown < wait:
            return
        self._shown = now
        left = f", at most {self._left(now, share):.0f} s left" if share > 0 else ""
        self._put(f"{self._what}: {share:.0%} searched{left}" + (f", {found}" if found else ""))

    def note(self, line: str) -> None:
        """Show a line that stays, once the searches take longer than a moment."""
        self._unseen.append(line)
        if self._clock() - self._begun >= QUIET_SECONDS:
            self._put("")

    def close(self) -> None:
        """End the watch: say if it has cut a search short."""
        if self.was_cut:
            self._unseen.append(
                f"the {self.seconds:g} s of the search are over: the best plan so far is taken"
            )
        if self.was_cut or self._line:
            self._put("")

    def _left(self, now: float, share: float) -> float:
        """Return the seconds that the present search still takes at most."""
        left = (now - self._search_begun) * (1 - share) / share
        return left if self.seconds is None else min(left, self._begun + self.seconds - now)

    def _put(self, line: str) -> None:
        """Write the lines not seen yet, then ``line``, over the line that stands there now."""
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
