"""Records when the passes and collectives of an iteration really ran, in the simulator's format.

On a CPU the recorder reads the host's monotonic clock. On CUDA it records events on the stream that
does the work, and reads them only after the iteration, so that the host need not wait earlier.
Neither host nor stream sees when a point-to-point transfer is complete. Transfers are therefore not
recorded, only the waits for them.

A pass may wait for collectives of its own. These waits are no spans; ``waits_within`` adds them up
for each pass. The two passes of a pair run in turns. The time of a turn, and the waits within it,
count for the pass whose turn it is.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple, TypeAlias, TypeVar

import torch

from megatron.runtime.observer import Began
from megatron.schedules.needs import Comm
from megatron.schedules.passes import Pass
from megatron.simulator.simulate import Span, comm_span, pair_spans, pass_span

T = TypeVar("T")


_Moment: TypeAlias = "float | torch.cuda.Event"


class _Within(NamedTuple):
    """A wait within a pass; ``item`` is the pass that has its turn, ``None`` outside of pairs."""

    item: Pass | None
    start: _Moment
    end: _Moment


class _Mark(NamedTuple):
    lane: str
    item: Pass | Comm
    start: _Moment
    end: _Moment
    joined: Pass | None = None
    turns: tuple[tuple[Pass, _Moment], ...] = ()
    within: tuple[_Within, ...] = ()


class Recorder:
    """Records one rank's iteration, by the clock of its device; an ``Observer``."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._cuda = device.type == "cuda"
        self._marks: list[_Mark] = []
        self._within: list[_Within] = []  # of the pass or the pair that runs
        self._turns: list[tuple[Pass, _Moment]] = []  # of the pair that runs, with their begins
        self.begin()

    def begin(self, start: float | None = None) -> None:
        """Drop all records and set the time to zero; on CUDA this waits for the device.

        Args:
            start: time zero on the host's clock (``time.perf_counter``); see
                ``clocks.common_start``. By default the current time, right after a barrier.
        """
        if self._cuda:
            torch.cuda.synchronize()  # stream and host now agree up to one launch
        self._marks, self._within, self._turns = [], [], []
        self._origin = self._now()
        here = self._origin if isinstance(self._origin, float) else time.perf_counter()
        self._origin_seconds = 0.0 if start is None else here - start

    @contextmanager
    def span(self, item: Pass) -> Iterator[None]:
        """Record a pass."""
        yield from self._record("compute", item)

    @contextmanager
    def pair(self, first: Pass, second: Pass) -> Iterator[Began]:
        """Record a pair, and the turns of its passes."""
        for _ in self._record("compute", first, second):
            yield self._began

    @contextmanager
    def waiting(self, comm: Comm) -> Iterator[None]:
        """Record how long the host, or on CUDA the stream of the passes, waits for ``comm``."""
        yield from self._record("wait", comm)

    @contextmanager
    def within(self) -> Iterator[None]:
        """Record how long the running pass waits for a collective of its own.

        A pass that is captured as a graph runs later, so nothing is recorded then.
        """
        if self._cuda and torch.cuda.is_current_stream_capturing():
            yield
            return
        item = self._turns[-1][0] if self._turns else None
        start = self._now()
        yield
        self._within.append(_Within(item, start, self._now()))

    def timed(self, comm: Comm, work: Callable[[], T]) -> Callable[[], T]:
        """Return ``work`` that records itself in the communication lane."""

        def recorded() -> T:
            start = self._now()
            value = work()
            self._marks.append(_Mark("comm", comm, start, self._now()))
            return value

        return recorded

    def spans(self) -> list[Span]:
        """Return all records, in seconds since ``begin``; on CUDA this waits for the device."""
        if self._cuda:
            torch.cuda.synchronize()
        return [span for mark in self._marks for span in self._spans_of(mark)]

    def waits_within(self) -> list[float]:
        """Return the seconds that each pass waited for collectives of its own.

        The order is that of the passes in ``spans``. On CUDA this waits for the device.
        """
        if self._cuda:
            torch.cuda.synchronize()
        found = list[float]()
        for mark in self._marks:
            if mark.lane == "compute":
                found += self._waits_of(mark)
        return found

    def _spans_of(self, mark: _Mark) -> tuple[Span, ...]:
        item, start, end = mark.item, self._seconds(mark.start), self._seconds(mark.end)
        if mark.joined is not None and isinstance(item, Pass):
            middle = start + self._turns_of(mark, item)
            return pair_spans(self._rank, (item, mark.joined), start, middle, end)
        if isinstance(item, Pass):
            return (pass_span(self._rank, item, start, end),)
        return (comm_span(self._rank, mark.lane, item, start, end),)

    def _turns_of(self, mark: _Mark, item: Pass) -> float:
        """Return the seconds of all turns of a pass of a pair; the first turn begins with it."""
        moments = [mark.start, *(moment for _, moment in mark.turns[1:]), mark.end]
        lengths = [end - begin for begin, end in pairwise(map(self._seconds, moments))]
        return sum(
            length for (own, _), length in zip(mark.turns, lengths, strict=True) if own == item
        )

    def _waits_of(self, mark: _Mark) -> list[float]:
        """Return the seconds that the pass, or each pass of the pair, waited within itself."""
        items = [None] if mark.joined is None else [mark.item, mark.joined]
        return [
            sum(
                self._seconds(end) - self._seconds(start)
                for own, start, end in mark.within
                if own == item
            )
            for item in items
        ]

    def _began(self, item: Pass) -> None:
        """Record that a turn of a pair begins."""
        self._turns.append((item, self._now()))

    def _record(self, lane: str, item: Pass | Comm, joined: Pass | None = None) -> Iterator[None]:
        start = self._now()
        yield
        turns, within = tuple[tuple[Pass, _Moment], ...](), tuple[_Within, ...]()
        if lane == "compute":
            within, self._within = tuple(self._within), []
            turns, self._turns = tuple(self._turns), []
        self._marks.append(_Mark(lane, item, start, self._now(), joined, turns, within))

    def _now(self) -> _Moment:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, mark: _Moment) -> float:
        if isinstance(mark, float):
            assert isinstance(self._origin, float)
            return mark - self._origin + self._origin_seconds
        assert isinstance(self._origin, torch.cuda.Event)
        milliseconds: float = self._origin.elapsed_time(mark)
        return milliseconds / 1000 + self._origin_seconds
