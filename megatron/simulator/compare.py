"""Compare two timelines of one plan: the simulated one and the real one.

The comparison answers three questions: is an iteration as long as planned, are the passes as long
as planned, and why do ranks idle?
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf
from typing import NamedTuple

from megatron.schedules.needs import COMM_KINDS, REPLICA_KINDS
from megatron.schedules.passes import PASS_KINDS
from megatron.simulator.costs.from_timelines import MESSAGES, meetings
from megatron.simulator.simulate import Span, Timeline


class Pair(NamedTuple):
    """The same quantity of both timelines."""

    planned: float
    real: float

    @property
    def ratio(self) -> float:
        """Real divided by planned; infinite if only planned is 0; 1 if both are 0."""
        if self.planned:
            return self.real / self.planned
        return inf if self.real else 1.0


@dataclass(frozen=True)
class Bubble:
    """The parts of a rank's idle time by cause, as shares of the iteration.

    Attributes:
        peer: waiting for an activation or a gradient.
        barrier: waiting for a collective of the vocabulary.
        replicas: waiting for gradients or parameters of the replicas.
        host: idle before a pass without a wait for a communication, because the host issues the
            pass late.
        done: idle after the rank's last pass and wait, while other ranks still work.
    """

    peer: float
    barrier: float
    replicas: float
    host: float
    done: float


@dataclass(frozen=True)
class PassTimes:
    """Mean times of one kind of pass: over all ranks, and for each rank with such passes."""

    mean: Pair
    by_rank: Mapping[int, Pair]


@dataclass(frozen=True)
class Comparison:
    """Two timelines side by side; times in the unit of the timelines.

    Attributes:
        total: time from the first start of a pass on any rank to the end of the last pass, or of
            the last wait for replicas.
        idle: share of the total time in which a rank runs no pass, averaged over all ranks.
        passes: mean times by kind of pass.
        overlap: by kind of collective, the share of its time in which its ranks compute. A kind
            that takes no time in both timelines is left out. If a kind takes no time in only one
            timeline, its share in that timeline is 1.
        bubbles: for every rank, its idle time, planned and real.
    """

    total: Pair
    idle: Pair
    passes: Mapping[str, PassTimes]
    overlap: Mapping[str, Pair]
    bubbles: Sequence[tuple[Bubble, Bubble]]

    def as_json(self) -> dict[str, object]:
        """Return all fields as JSON values, with a ratio beside every pair of times."""
        return {
            "total": _json(self.total),
            "idle": self.idle._asdict(),
            "passes": {
                kind: {
                    **_json(times.mean),
                    "by_rank": {str(rank): _json(pair) for rank, pair in times.by_rank.items()},
                }
                for kind, times in self.passes.items()
            },
            "overlap": {kind: pair._asdict() for kind, pair in self.overlap.items()},
            "bubbles": [
                {"planned": asdict(planned), "real": asdict(real)} for planned, real in self.bubbles
            ],
        }


def compare(planned: Timeline, real: Timeline) -> Comparison:
    """Compare two timelines of the same plan.

    Raises:
        ValueError: if their plans differ; the message names a difference.
    """
    _check_same_passes(planned, real)
    both = (planned, real)
    present = {span.kind for span in planned.spans if span.lane == "compute"}
    overlaps = [overlap(timeline) for timeline in both]
    return Comparison(
        total=Pair(*map(total, both)),
        idle=Pair(*map(idle, both)),
        passes={kind: _pass_times(kind, planned, real) for kind in PASS_KINDS if kind in present},
        overlap={
            kind: Pair(*(own.get(kind, 1.0) for own in overlaps))
            for kind in COMM_KINDS
            if any(kind in own for own in overlaps)
        },
        bubbles=[(bubble(planned, rank), bubble(real, rank)) for rank in range(planned.ranks)],
    )


def total(timeline: Timeline) -> float:
    """Return the time from the first start of a pass to the last end of a pass or exchange."""
    begin, end = _limits(timeline)
    return end - begin


def idle(timeline: Timeline) -> float:
    """Return the share of ``total`` in which a rank runs no pass, averaged over the ranks."""
    work = sum(map(timeline.work, range(timeline.ranks)))
    return 1 - work / (timeline.ranks * (total(timeline) or 1.0))


def bubble(timeline: Timeline, rank: int) -> Bubble:
    """Return the idle time of ``rank`` by cause; these shares and its work's share sum to 1."""
    begin, end = _limits(timeline)
    last = _last_end(timeline, rank)
    peer = barrier = replicas = 0.0
    for wait in timeline.waits:
        if wait.rank != rank:
            continue
        length = max(0.0, min(wait.end, last) - max(wait.start, begin))
        if wait.kind in MESSAGES:
            peer += length
        elif wait.kind in REPLICA_KINDS:
            replicas += length
        else:
            barrier += length
    host = last - begin - timeline.work(rank) - peer - barrier - replicas
    shares = (peer, barrier, replicas, host, end - last)
    whole = end - begin or 1.0
    return Bubble(*(share / whole for share in shares))


def overlap(timeline: Timeline) -> dict[str, float]:
    """Return for each kind of collective the share of its time in which the ranks compute.

    The time of a collective begins when the last rank has joined. Kinds that take no time are left
    out.
    """
    starts = [[span.start for span in timeline.compute(rank)] for rank in range(timeline.ranks)]
    lengths: dict[str, float] = defaultdict(float)
    computing: dict[str, float] = defaultdict(float)
    for spans in meetings(timeline).values():
        for span in spans:
            lengths[span.kind] += span.length
            computing[span.kind] += _computing(timeline, starts[span.rank], span)
    return {kind: computing[kind] / length for kind, length in lengths.items() if length}


def _computing(timeline: Timeline, starts: Sequence[float], span: Span) -> float:
    """Return the time within ``span`` in which its rank computes."""
    row = timeline.compute(span.rank)
    time = 0.0
    for index in range(max(0, bisect_right(starts, span.start) - 1), len(row)):
        if row[index].start >= span.end:
            break
        time += max(0.0, min(row[index].end, span.end) - max(row[index].start, span.start))
    return time


def _limits(timeline: Timeline) -> tuple[float, float]:
    ranks = range(timeline.ranks)
    begin = min(timeline.compute(rank)[0].start for rank in ranks)
    return begin, max(_last_end(timeline, rank) for rank in ranks)


def _last_end(timeline: Timeline, rank: int) -> float:
    """Return the end of a rank's last pass, or of a later wait for replicas."""
    ends = [wait.end for wait in timeline.waits if wait.rank == rank and wait.kind in REPLICA_KINDS]
    return max([timeline.compute(rank)[-1].end, *ends])


def _pass_times(kind: str, planned: Timeline, real: Timeline) -> PassTimes:
    sums = [_sums(kind, timeline) for timeline in (planned, real)]
    ranks = [rank for rank, (count, _) in enumerate(sums[0]) if count]
    by_rank = {r: Pair(*(own[r][1] / own[r][0] for own in sums)) for r in ranks}
    means = (sum(t for _, t in own) / sum(count for count, _ in own) for own in sums)
    return PassTimes(Pair(*means), by_rank)


def _sums(kind: str, timeline: Timeline) -> list[tuple[int, float]]:
    """Return for every rank the number of its passes of ``kind`` and their total time."""
    rows = ([s for s in timeline.compute(r) if s.kind == kind] for r in range(timeline.ranks))
    return [(len(row), sum(span.length for span in row)) for row in rows]


def _check_same_passes(planned: Timeline, real: Timeline) -> None:
    if planned.ranks != real.ranks:
        raise ValueError(
            f"the plan has {planned.ranks} ranks and the run {real.ranks}: compare timelines of "
            "one plan"
        )
    passes = [{(s.rank, s.label) for s in t.spans if s.lane == "compute"} for t in (planned, real)]
    for own, other, where in ((0, 1, "planned"), (1, 0, "run")):
        for rank, label in sorted(passes[own] - passes[other]):
            raise ValueError(
                f"{label} of rank {rank} is only {where}: compare timelines of one plan"
            )
    idle = set(range(planned.ranks)) - {rank for rank, _ in passes[0]}
    if idle:
        raise ValueError(f"rank {min(idle)} has no passes: give timelines of whole iterations")


def _json(pair: Pair) -> dict[str, float | None]:
    return {**pair._asdict(), "ratio": pair.ratio if pair.ratio < inf else None}
