"""Spread layers of unequal times over stages, such that the slowest rank is as fast as possible.

Layers keep their order, so a stage has layers that follow one another. If every rank has one stage,
the result is the best that there is. If ranks have several stages, it is the best for the slowest
stage, improved for the slowest rank as long as moving one layer to another stage helps.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf

from megatron.simulator.costs.redistribute import check_spread

_SLACK = 1 + 1e-9
"""Loads that differ by less than this factor are equal: sums of equal times may differ by bits."""

_Load = Callable[[int, int, int], float]
"""The time of a stage that has the layers from a first one up to another one: (stage, from, to)."""


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

    slowest = max(_loads(_parted(ends, extra, last, None), load))
    found = _parted(ends, extra, last, slowest * _SLACK)
    if len({rank for rank, _ in stages}) < number:
        found = _improved(found, stages, load)
    even = [layers // number] * number
    if layers % number or _better(_worth(found, stages, load)[:2], _worth(even, stages, load)[:2]):
        return found
    return even


def _parted(
    ends: Sequence[float], extra: Sequence[float], last: int | None, limit: float | None
) -> list[int]:
    """Return the layers of every stage with the least load of all stages together.

    Of equally good numbers of layers of a last stage the largest counts, because with 1F1B a later
    stage holds fewer microbatches.

    Args:
        ends: the time of the first layers, by their number.
        extra: for each stage, the time of its other work.
        last: layers of the last stage, if their number is chosen.
        limit: ``None``: the load of the slowest stage counts. Else the sum of the squares of all
            loads counts, and no load may be above this limit.
    """
    layers, number = len(ends) - 1, len(extra)
    best = [0.0] + [inf] * layers  # of the stages so far, by their layers
    begins = list[list[int]]()
    for stage, own in enumerate(extra):
        alone = last if stage == number - 1 else None
        found = [_least(best, ends, end, own, alone, limit) for end in range(layers + 1)]
        best = [worth for worth, _ in found]
        begins.append([begin for _, begin in found])
    counts, end = list[int](), layers
    for begin_of in reversed(begins):
        counts.append(end - begin_of[end])
        end = begin_of[end]
    return [*reversed(counts)]


def _least(
    best: Sequence[float],
    ends: Sequence[float],
    end: int,
    extra: float,
    last: int | None,
    limit: float | None,
) -> tuple[float, int]:
    """Return the least load of all stages up to one, and the first layer of this stage.

    The arguments are as for ``_parted``. ``best`` is the least load of the stages before. The loop
    calls no function: it runs a hundred thousand times for a model of 126 layers on 64 stages.
    """
    least, first = inf, end
    whole = extra + ends[end]
    for begin in range(end, -1, -1):
        own = whole - ends[begin] if last is None or end - begin == last else inf
        if limit is not None:
            own = own * own if own <= limit else inf
        if own > least:  # with still more layers the load only grows
            break
        before = best[begin]
        if limit is not None:
            before += own
        elif own > before:
            before = own
        if before <= least:
            least, first = before, begin
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
