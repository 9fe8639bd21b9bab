"""Records when the passes and collectives of an iteration really ran, in the simulator's format.

On a CPU the recorder reads the host's monotonic clock. On CUDA it records events on the stream that
does the work, and reads them only after the iteration, so that the host need not wait earlier.
Neither host nor stream sees when a point-to-point transfer is complete. Transfers are therefore not
recorded, only the waits for them.

A pass may wait for collectives of its own. These waits are no spans; ``waits_within`` adds them up
for each pass.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias, TypeVar

import torch

from megatron.schedules.needs import Comm
from megatron.schedules.passes import Pass
from megatron.simulator.simulate import Span, comm_span, pair_spans, pass_span

T = TypeVar("T")


_Moment: TypeAlias = "float | torch.cuda.Event"


class _Mark(NamedTuple):
    lane: str
    item: Pass | Comm
    start: _Moment
    end: _Moment
    joined: Pass | None = None
    within: tuple[tuple[_Moment, _Moment], ...] = ()


class Recorder:
    """Records one rank's iteration, by the clock of its device; an ``Observer``."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._cuda = device.type == "cuda"
        self._marks: list[_Mark] = []
        self._within: list[tuple[_Moment, _Moment]] = []  # waits of the pass that runs
        self.begin()

    def begin(self, start: float | None = None) -> None:
        """Drop all records and set the time to zero; on CUDA this waits for the device.

        Args:
            start: time zero on the host's clock (``time.perf_counter``); see
                ``clocks.common_start``. By default the current time, right after a barrier.
        """
        if self._cuda:
            torch.cuda.synchronize()  # stream and host now agree up to one launch
        self._marks, self._within = [], []
        self._origin = self._now()
        here = self._origin if isinstance(self._origin, float) else time.perf_counter()
        self._origin_seconds = 0.0 if start is None else here - start

    @contextmanager
    def span(self, item: Pass) -> Iterator[None]:
        """Record a pass."""
        yield from self._record("compute", item)

    @contextmanager
    def pair(self, first: Pass, second: Pass) -> Iterator[None]:
        """Record a pair; how its passes took turns is not recorded, so each gets half the time."""
        yield from self._record("compute", first, second)

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
        start = self._now()
        yield
        self._within.append((start, self._now()))

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

        The order is that of the passes in ``spans``; each pass of a pair gets half of the waits. On
        CUDA this waits for the device.
        """
        if self._cuda:
            torch.cuda.synchronize()
        found = list[float]()
        for mark in self._marks:
            if mark.lane == "compute":
                total = sum(self._seconds(end) - self._seconds(start) for start, end in mark.within)
                found += [total] if mark.joined is None else [total / 2] * 2
        return found

    def _spans_of(self, mark: _Mark) -> tuple[Span, ...]:
        item, start, end = mark.item, self._seconds(mark.start), self._seconds(mark.end)
        if mark.joined is not None and isinstance(item, Pass):
            return pair_spans(self._rank, (item, mark.joined), start, (start + end) / 2, end)
        if isinstance(item, Pass):
            return (pass_span(self._rank, item, start, end),)
        return (comm_span(self._rank, mark.lane, item, start, end),)

    def _record(self, lane: str, item: Pass | Comm, joined: Pass | None = None) -> Iterator[None]:
        start = self._now()
        yield
        within: tuple[tuple[_Moment, _Moment], ...] = ()
        if lane == "compute":
            within, self._within = tuple(self._within), []
        self._marks.append(_Mark(lane, item, start, self._now(), joined, within))

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
