"""Finds the rank that computes for longer than usual, and the passes in which it does.

Pipeline ranks have unequal work, so a rank is compared with the work that the plan gives it. The
plan may count in other units (FLOPs, or seconds of an earlier measurement), and it may rate kinds
of passes wrongly against each other. So the median rank tells how long a unit of each kind takes.
The *usual* time of a rank is the time of its work at this pace. Its *slowness* is its own time
divided by the usual time.

With at least ``REPLICAS`` data-parallel replicas the median is over the ranks of the same pipeline
rank. These do the same work, so no error of the plan is left, and no machine has most of them. With
fewer replicas it is over all ranks.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

from megatron.schedules.costs import Costs
from megatron.schedules.passes import Pass
from megatron.schedules.plan import Plan
from megatron.training.metrics.records import RankFigures, Slowest
from megatron.training.setup import TrainState

SLOW: Final = 1.2
"""A rank whose slowness is at least this is a straggler in the printed lines."""

REPLICAS: Final = 3
"""Fewest replicas of which two are usual if one is slow."""

_MOST_LINES: Final = 8

Times = Mapping[str, float]
"""Kind of passes -> time of all such passes of a rank in an iteration, in any unit."""


@dataclass(frozen=True)
class Compared:
    """A rank, compared with the usual rank.

    Attributes:
        rank: in the job.
        seconds: computing time.
        usual: computing time that the same work takes on the median rank.
        passes: kind of passes in which the rank loses most.
        of_passes: time of these passes over their usual time.
    """

    rank: int
    seconds: float
    usual: float
    passes: str
    of_passes: float

    @property
    def slowness(self) -> float:
        """The computing time over the usual one."""
        return self.seconds / self.usual


def compare(
    measured: Mapping[int, Times], planned: Mapping[int, Times], alike: Mapping[int, int]
) -> list[Compared]:
    """Compare ranks, and return the slowest one first.

    Args:
        measured: seconds of every rank that was timed.
        planned: the time that the plan expects on these ranks, in its unit. Where it expects no
            time of a kind from any of them, passes of that kind count as alike on all ranks. A kind
            of which it expects no time from this rank alone counts as usual there.
        alike: for each of these ranks, a number that ranks share which are compared.
    """
    usual: dict[int, dict[str, float]] = {rank: {} for rank in measured}
    for group in set(alike.values()):
        members = [rank for rank in measured if alike[rank] == group]
        for kind in {kind for rank in members for kind in measured[rank]}:
            timed = [rank for rank in members if kind in measured[rank]]
            work = {rank: own for rank in timed if (own := planned[rank].get(kind, 0.0)) > 0}
            work = work or dict.fromkeys(timed, 1.0)
            unit = median(measured[rank][kind] / work[rank] for rank in work)
            for rank in timed:
                known = rank in work
                usual[rank][kind] = unit * work[rank] if known else measured[rank][kind]
    found = [_compared(rank, own, usual[rank]) for rank, own in measured.items()]
    return sorted((own for own in found if own.usual > 0), key=lambda own: -own.slowness)


def _compared(rank: int, own: Times, usual: Times) -> Compared:
    worst = max(own, key=lambda kind: own[kind] - usual[kind])
    of_passes = own[worst] / usual[worst] if usual[worst] > 0 else 1.0
    return Compared(rank, sum(own.values()), sum(usual.values()), worst, of_passes)


def planned_times(plan: Plan, costs: Costs) -> list[Times]:
    """Return the time of each kind of passes for every pipeline rank, in the unit of the costs."""
    found = list[Times]()
    for rank, row in enumerate(plan.rows):
        times = dict.fromkeys(map(_kind, row), 0.0)
        # Microbatches are alike, so one pass stands for all passes of its chunk and its slice.
        for item, count in Counter(item._replace(microbatch=0) for item in row).items():
            times[item.kind] += count * costs.of_pass(plan, rank, item)
        found.append(times)
    return found


def _kind(item: Pass) -> str:
    return item.kind


class Stragglers:
    """Compares the ranks of a job by their figures; one rank calls it for all."""

    def __init__(self, state: TrainState) -> None:
        self._state = state
        self._planned: tuple[Plan, list[Times]] | None = None

    def compared(
        self, figures: Sequence[RankFigures]
    ) -> tuple[tuple[RankFigures, ...], Slowest | None]:
        """Return the figures with each rank's slowness, and the slowest rank if ranks were timed.

        A job of one rank has no slowest one.
        """
        timed = {own.rank: own.computing for own in figures if own.computing}
        if len(timed) < 2:
            return tuple(figures), None
        grid, planned = self._state.groups.grid, self._times()
        stages = {rank: grid.coordinates(rank).pipeline for rank in timed}
        alike = stages if grid.data_size >= REPLICAS else dict.fromkeys(timed, 0)
        found = compare(timed, {rank: planned[stages[rank]] for rank in timed}, alike)
        if not found:
            return tuple(figures), None
        slowness = {own.rank: own.slowness for own in found}
        told = tuple(replace(own, slowness=slowness.get(own.rank)) for own in figures)
        return told, self._slowest(found)

    def _times(self) -> list[Times]:
        plan = self._state.plan
        if self._planned is None or self._planned[0] is not plan:
            self._planned = plan, planned_times(plan, self._state.pipeline.costs)
        return self._planned[1]

    def _slowest(self, found: Sequence[Compared]) -> Slowest:
        first, seconds = found[0], [own.seconds for own in found]
        place = self._state.groups.grid.coordinates(first.rank)
        return Slowest(
            rank=first.rank,
            pipeline=place.pipeline,
            tensor=place.tensor,
            context=place.context,
            data=place.data,
            slowness=first.slowness,
            seconds=first.seconds,
            usual=first.usual,
            passes=first.passes,
            passes_slowness=first.of_passes,
            median=median(seconds),
            fastest=min(seconds),
        )


def report(
    iteration: int, figures: Sequence[RankFigures], slowest: Slowest | None
) -> Iterator[str]:
    """Yield the lines of ``--log-straggler`` on an iteration, counted from 1."""
    if slowest is None:
        return
    own = (
        f"rank {slowest.rank} (pp {slowest.pipeline}, tp {slowest.tensor}, cp {slowest.context}, "
        f"dp {slowest.data}) computes for {slowest.seconds * 1e3:.1f} ms, {slowest.slowness:.2f} "
        f"times as long as usual, {slowest.passes} {slowest.passes_slowness:.2f} times"
    )
    if slowest.slowness < SLOW:
        yield f"no straggler in iteration {iteration}; the slowest is {own}"
        return
    yield f"straggler in iteration {iteration}: {own}"
    others = [
        (rank.slowness, rank.rank)
        for rank in figures
        if rank.slowness is not None and rank.slowness >= SLOW and rank.rank != slowest.rank
    ]
    for slowness, rank in sorted(others, key=lambda one: (-one[0], one[1]))[: _MOST_LINES - 1]:
        yield f"straggler in iteration {iteration}: rank {rank}, {slowness:.2f} times"
    if len(others) >= _MOST_LINES:
        yield f"and {len(others) - _MOST_LINES + 1} more stragglers in iteration {iteration}"
