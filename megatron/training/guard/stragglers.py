"""Reports slow ranks, and the kind of pass in which they are slow: ``--log-straggler``.

For every printed line one iteration is timed. Ranks have unequal stages, so a time is compared with
the time that the plan expects on that rank. The plan may count in other units (FLOPs, or seconds of
an earlier measurement), so for every kind of pass the median rank sets the scale.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from megatron.runtime.observer import Observer
from megatron.runtime.timeline import Recorder
from megatron.schedules.passes import PLANNED_KINDS, Pass, PassKind
from megatron.simulator.simulate import Span
from megatron.training.setup import TrainState

SLOW: Final = 1.2
"""A rank is reported if it takes at least this many times as long as the plan expects."""

Part = tuple[PassKind, int]
"""Kind and chunk of a pass."""

Times = Mapping[Part, float]
"""Time of a pass, for every part that a rank runs, in any unit."""


@dataclass(frozen=True)
class Slow:
    """A rank that is slow in one part of its work.

    Attributes:
        rank: rank of the job.
        part: kind and chunk of the passes.
        seconds: median time of a pass.
        by_median: ``seconds`` as a multiple of the median of all ranks.
        by_plan: measured time over planned time of this rank, divided by the median of this ratio
            over all ranks, because a plan may have other units than seconds.
    """

    rank: int
    part: Part
    seconds: float
    by_median: float
    by_plan: float

    def __str__(self) -> str:
        """Return the rank, its part and its times in words."""
        kind, chunk = self.part
        name = f"{kind} of chunk {chunk}" if chunk else kind
        return (
            f"rank {self.rank}: {name} takes {self.seconds * 1e3:.1f} ms, {self.by_median:.2f} "
            f"times the median of ranks, {self.by_plan:.2f} times the plan"
        )


def compare(measured: Sequence[Times], planned: Sequence[Times]) -> list[Slow]:
    """Return how slow every rank is in each of its parts, the largest ``by_plan`` first.

    Both arguments have the times of a pass for every rank: ``measured`` in seconds, ``planned`` in
    the unit of the plan.
    """
    found = []
    for part in {part for own in measured for part in own}:
        ranks = [rank for rank, own in enumerate(measured) if part in own]
        by_plan = {rank: measured[rank][part] / planned[rank][part] for rank in ranks}
        usual, scale = median(measured[r][part] for r in ranks), median(by_plan.values())
        found += [
            Slow(r, part, measured[r][part], measured[r][part] / usual, by_plan[r] / scale)
            for r in ranks
        ]
    return sorted(found, key=lambda slow: (-slow.by_plan, slow.rank, slow.part))


def report(iteration: int, compared: Sequence[Slow]) -> Iterator[str]:
    """Yield the lines on an iteration, counted from 1; ``compared`` is from ``compare``."""
    slow = [one for one in compared if one.by_plan >= SLOW]
    for one in slow:
        yield f"straggler in iteration {iteration}: {one}"
    if not slow and compared:
        yield f"no straggler in iteration {iteration}; the slowest is {compared[0]}"


class StragglerWatch:
    """Times some iterations of one rank; all ranks call it alike.

    Of every ``interval`` iterations the last is timed. ``None``: no iteration is timed.
    """

    def __init__(self, interval: int | None, state: TrainState, say: Callable[[str], None]) -> None:
        self._interval = interval
        self._state = state
        self._say = say
        self._recorder: Recorder | None = None

    def times(self, iteration: int) -> bool:
        """Return whether ``iteration``, from 0, is timed; then it must run alone and only once."""
        return self._interval is not None and (iteration + 1) % self._interval == 0

    def begin(self, iteration: int, other: Observer | None = None) -> Observer | None:
        """Return the observer of ``iteration``: ``other`` if there is one.

        If the iteration is timed and ``other`` is a recorder, it serves both purposes.
        """
        groups, self._recorder = self._state.groups, None
        if self.times(iteration) and (other is None or isinstance(other, Recorder)):
            self._recorder = other or Recorder(groups.pipeline.rank, groups.device)
        return self._recorder or other

    def finished(self, iteration: int) -> None:
        """Tell how slow the ranks were in ``iteration``, if it was timed."""
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return
        groups, pipeline = self._state.groups, self._state.pipeline
        own, plan, rank = median_times(recorder.spans()), self._state.plan, groups.pipeline.rank
        planned = {
            (kind, chunk): pipeline.costs.of_pass(plan, rank, Pass(kind, 0, chunk)) or 1.0
            for kind, chunk in own
        }
        everywhere = groups.world.all_gather_object((own, planned))
        compared = compare([times for times, _ in everywhere], [plan for _, plan in everywhere])
        for line in report(iteration + 1, compared):
            self._say(line)


def median_times(spans: Sequence[Span]) -> Times:
    """Return the median time of a pass of each part, without updates: these are in no plan."""
    times: dict[Part, list[float]] = defaultdict(list)
    for span in spans:
        if span.lane == "compute" and span.kind in PLANNED_KINDS:
            item = Pass.parse(span.label)
            times[item.kind, item.chunk].append(span.end - span.start)
    return {part: median(seconds) for part, seconds in times.items()}
