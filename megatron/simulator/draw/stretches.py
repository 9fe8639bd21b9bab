"""The part of a timeline that is drawn, and its strips, which stand below one another.

A drawing has a bounded width. A longer drawing goes on in further strips, like lines of music on
paper.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, inf
from statistics import median
from typing import Final, NamedTuple

from megatron.schedules.passes import CHUNKED_KINDS
from megatron.simulator.simulate import Span, Timeline

_TINY: Final = 1e-9
_NEGLIGIBLE: Final = 0.1
"""Share of the longest kind's time below which a kind of pass has no say in the scale."""
_MOST_STRIPS: Final = 1000
_NUMBER: Final = r"((?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)?"
_TIMES: Final = re.compile(f"{_NUMBER}:{_NUMBER}")
_MICROBATCHES: Final = re.compile(r"m(\d*):m(\d*)")


class Stretch(NamedTuple):
    """A part of the time, from ``begin`` to ``end``."""

    begin: float
    end: float

    @property
    def length(self) -> float:
        """Time between ``begin`` and ``end``."""
        return self.end - self.begin

    def shows(self, span: Span) -> bool:
        """Return whether a part of ``span`` is in the stretch."""
        return self.begin < span.end and span.start < self.end


@dataclass(frozen=True)
class Window:
    """The part of a timeline that a reader wants to see.

    Attributes:
        first: begin of the window: a time, counted from the first start of all passes, or a
            microbatch.
        last: end of the window: a time, or the last microbatch.
        microbatches: whether ``first`` and ``last`` are microbatches. If so, the window reaches
            from the start of their first pass of a model chunk to the end of their last pass of a
            model chunk. It also shows all other passes in this time.
    """

    first: float = 0.0
    last: float = inf
    microbatches: bool = False

    @classmethod
    def parse(cls, text: str) -> "Window":
        """Return the window of ``FROM:TO`` (times) or ``mFROM:mTO`` (microbatches).

        Each of the two numbers may be left out.

        Raises:
            ValueError: if the text is no window.
        """
        for pattern, microbatches in ((_TIMES, False), (_MICROBATCHES, True)):
            found = pattern.fullmatch(text)
            if found is None:
                continue
            window = cls(float(found[1] or 0), float(found[2] or inf), microbatches)
            if window.first < window.last or (microbatches and window.first == window.last):
                return window
        raise ValueError("give FROM:TO, as 1.5:3 (times) or m8:m15 (microbatches)")

    def __str__(self) -> str:
        """Return the text that ``parse`` reads."""
        mark = "m" if self.microbatches else ""
        last = "" if self.last == inf else f"{self.last:g}"
        return f"{mark}{self.first:g}:{mark}{last}"

    def stretch(self, timelines: Sequence[Timeline]) -> Stretch:
        """Return the part of the time that the window shows; the timelines begin at 0.

        Raises:
            ValueError: if nothing runs in the window.
        """
        spans = [span for timeline in timelines for span in timeline.spans]
        if self.microbatches:
            model = [s for s in spans if s.lane == "compute" and s.kind in CHUNKED_KINDS]
            spans = [s for s in model if self.first <= s.microbatch <= self.last]
        first, last = (0.0, inf) if self.microbatches else (self.first, self.last)
        begin = max(first, min((span.start for span in spans), default=0.0))
        end = min(last, max((span.end for span in spans), default=0.0))
        if begin >= end:
            raise ValueError(f"--window {self}: nothing runs there: {_what_runs(timelines)}")
        return Stretch(0.0 if self == WHOLE else begin, end)


WHOLE: Final = Window()
"""The window that shows everything."""


def _what_runs(timelines: Sequence[Timeline]) -> str:
    end = max((timeline.end for timeline in timelines), default=0.0)
    spans = (span for timeline in timelines for span in timeline.spans)
    last = max((span.microbatch for span in spans if span.kind in CHUNKED_KINDS), default=0)
    return f"the times are 0:{end:.4g} and the microbatches m0:m{last}"


def from_zero(timeline: Timeline) -> Timeline:
    """Return the spans of ``timeline`` that take time, with times counted from the first start."""
    seen = [span for span in timeline.spans if span.end > span.start]
    origin = min((span.start for span in seen), default=0.0)
    segments = (span for span in timeline.segments if span.end > span.start)

    def moved(spans: Iterable[Span]) -> tuple[Span, ...]:
        return tuple(s._replace(start=s.start - origin, end=s.end - origin) for s in spans)

    return Timeline(timeline.ranks, moved(seen), segments=moved(segments))


def strips(whole: Stretch, longest: float) -> list[Stretch]:
    """Cut ``whole`` into as few strips of equal length, at most ``longest``, as possible.

    Raises:
        ValueError: if there are too many strips to look at.
    """
    if whole.length / longest > _MOST_STRIPS:
        raise ValueError(
            f"a picture of the time from {whole.begin:.4g} to {whole.end:.4g} would have more than "
            f"{_MOST_STRIPS} strips, as its usual pass is so short: show a part with --window"
        )
    count = max(1, ceil(whole.length / longest - _TINY))
    bounds = [whole.begin + whole.length * index / count for index in range(count)] + [whole.end]
    return [Stretch(begin, end) for begin, end in pairwise(bounds)]


def shortest_pass(timelines: Iterable[Timeline]) -> float:
    """Return the usual time of the shortest kind of pass of a model chunk; 0 if there is none.

    Drawings take their scale from this time. They would be too long with a scale from the shorter
    passes of the vocabulary, from outliers of a recorded run, or from kinds of passes that take
    hardly any time beside another kind.
    """
    lengths: dict[str, list[float]] = {}
    for timeline in timelines:
        for span in timeline.spans:
            if span.lane == "compute":
                lengths.setdefault(span.kind, []).append(span.length)
    chunked = [lengths[kind] for kind in CHUNKED_KINDS if kind in lengths]
    usual = [median(times) for times in chunked or lengths.values()]
    return min((time for time in usual if time >= _NEGLIGIBLE * max(usual)), default=0.0)
