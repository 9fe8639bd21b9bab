"""Spread layers of unequal times over stages, such that the slowest rank is as fast as possible.

Layers keep their order, so a stage has layers that follow one another. If every rank has one stage,
the result is the best that there is. If ranks have several stages, it is the best for the slowest
stage, improved for the slowest rank as long as moving one layer to another stage helps.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf
from operator import add

from megatron.simulator.costs.redistribute import check_spread

_SLACK = 1 + 1e-9
"""Loads that differ by less than this factor are equal: sums of equal times may differ by bits."""

_Load = Callable[[int, int, int], float]
"""The time of a stage that has the layers from a first one up to another one: (stage, from, to)."""

_Joined = Callable[[float, float], float]
"""The load of all stages that counts, from the load of the stages before and of one more stage."""


def spread_unequal(
    times: Sequence[float],
    stages: Sequence[tuple[int, int]],
    extra: Sequence[float],
    last: int | None = None,
) -> list[int]:
    """Return the layers of every stage.

    If equally many layers on every stage are as good, every stage has equally many.

    Args:
        times: time of every layer of the model, in any unit.
        stages: (rank, chunk) in the order of the data, as in ``Plan``.
        extra: for each stage, the time of its other work, in the same unit.
        last: layers of the last stage, if the user has chosen their number.

    Raises:
        ValueError: as ``redistribute``.
    """
    layers, number = len(times), len(stages)
    check_spread(layers, number, times, extra, last)
    ends = [0.0, *accumulate(times)]

    def load(stage: int, begin: int, end: int) -> float:
        if stage == number - 1 and last is not None and end - begin != last:
            return inf
        return extra[stage] + ends[end] - ends[begin]

    slowest = max(_loads(_parted(layers, number, load, max), load))

    def squared(stage: int, begin: int, end: int) -> float:
        own = load(stage, begin, end)
        return own * own if own <= slowest * _SLACK else inf

    found = _parted(layers, number, squared, add)
    if len({rank for rank, _ in stages}) < number:
        found = _improved(found, stages, load)
    even = [layers // number] * number
    if layers % number or _better(_worth(found, stages, load)[:2], _worth(even, stages, load)[:2]):
        return found
    return even


def _parted(layers: int, stages: int, load: _Load, joined: _Joined) -> list[int]:
    """Return the layers of every stage with the least joined load of all stages.

    Of equally good numbers of layers of a last stage the largest counts, because with 1F1B a later
    stage holds fewer microbatches.
    """
    best = [load(0, 0, end) for end in range(layers + 1)]  # of the first stages, by their layers
    begins = list[list[int]]()
    for stage in range(1, stages):
        found = [_least(stage, end, best, load, joined) for end in range(layers + 1)]
        best = [worth for worth, _ in found]
        begins.append([begin for _, begin in found])
    counts, end = list[int](), layers
    for begin_of in reversed(begins):
        counts.append(end - begin_of[end])
        end = begin_of[end]
    return [end, *reversed(counts)]


def _least(
    stage: int, end: int, best: Sequence[float], load: _Load, joined: _Joined
) -> tuple[float, int]:
    """Return the least joined load of all stages up to ``stage``, and the stage's first layer."""
    least, first = inf, end
    for begin in range(end, -1, -1):
        own = load(stage, begin, end)
        if own > least:  # with still more layers the load only grows
            break
        if (worth := joined(best[begin], own)) <= least:
            least, first = worth, begin
    return least, first


def _loads(counts: Sequence[int], load: _Load) -> list[float]:
    """Return the load of every stage."""
    ends = list(accumulate(counts))
    return list(map(load, range(len(counts)), [0, *ends[:-1]], ends))


def _by_rank(loads: Sequence[float], stages: Sequence[tuple[int, int]]) -> list[float]:
    """Return the load of every rank."""
    of_ranks = [0.0] * (1 + max(rank for rank, _ in stages))
    for (rank, _), own in zip(stages, loads, strict=True):
        of_ranks[rank] += own
    return of_ranks


def _worth(
    counts: Sequence[int], stages: Sequence[tuple[int, int]], load: _Load
) -> tuple[float, float, float]:
    """Return the load of the slowest rank, of the slowest stage, and the squared loads of ranks."""
    loads = _loads(counts, load)
    of_ranks = _by_rank(loads, stages)
    return max(of_ranks), max(loads), sum(own * own for own in of_ranks)


def _better(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether the first figure in which ``one`` and ``other`` differ is lower in ``one``."""
    for mine, its in zip(one, other, strict=True):
        if mine * _SLACK < its or its * _SLACK < mine:
            return mine < its
    return False


def _improved(counts: list[int], stages: Sequence[tuple[int, int]], load: _Load) -> list[int]:
    """Return counts after moving layers from stage to stage, one by one, as long as it helps.

    A layer leaves a stage of the slowest rank. The stages between keep their number of layers.
    """
    while True:
        worth = _worth(counts, stages, load)
        from_rank = _slowest_rank(counts, stages, load)
        moved = [
            _moved(counts, one, other)
            for one, (rank, _) in enumerate(stages)
            for other in range(len(stages))
            if rank == from_rank and one != other and counts[one]
        ]
        found = min(moved, key=lambda own: _worth(own, stages, load), default=counts)
        if not _better(_worth(found, stages, load), worth):
            return counts
        counts = found


def _slowest_rank(counts: Sequence[int], stages: Sequence[tuple[int, int]], load: _Load) -> int:
    loads = _by_rank(_loads(counts, load), stages)
    return loads.index(max(loads))


def _moved(counts: Sequence[int], one: int, other: int) -> list[int]:
    found = list(counts)
    found[one] -= 1
    found[other] += 1
    return found
