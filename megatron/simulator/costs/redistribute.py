"""Spread transformer layers over stages, some of which have other work as well (``redis``)."""

from collections.abc import Sequence
from heapq import heapify, heapreplace
from math import isfinite
from typing import Final

from megatron.schedules.counted import counted

MOST_LAYERS: Final = 100_000
"""Layers of the deepest model; more are a mistyped number."""


def redistribute(
    layers: int,
    stages: int,
    layer_time: float,
    extra: Sequence[float],
    last: int | None = None,
) -> list[int]:
    """Return the layers of every stage such that the slowest stage is as fast as possible.

    Layers are given out one by one, each to the stage that would then be the fastest. All layers
    take the same time, so no other distribution has a faster slowest stage. If several stages are
    equally fast, the last of them gets the layer, because with 1F1B a later stage holds fewer
    microbatches.

    Args:
        layers: transformer layers of the model.
        stages: pipeline stages; a stage may end up without a layer.
        layer_time: time of one layer, in any unit.
        extra: for each stage, the time of its other work: the input layer on the first stage, the
            output layer on the last.
        last: layers of the last stage, if the user has chosen their number.

    Raises:
        ValueError: if ``stages`` is below 1, another count is below 0 or above ``MOST_LAYERS``, a
            time is negative or not a number, the length of ``extra`` differs from ``stages``, or
            ``last`` does not fit ``layers``.
    """
    check_spread(layers, stages, (layer_time,), extra, last)
    counts = [0] * stages
    if last is not None:
        counts[-1] = last
    free = range(stages if last is None else stages - 1)
    lightest = [(extra[stage], -stage) for stage in free]  # of equal ones the last stage
    heapify(lightest)
    for _ in range(layers - sum(counts)):
        stage = -lightest[0][1]
        counts[stage] += 1
        heapreplace(lightest, (extra[stage] + counts[stage] * layer_time, -stage))
    return counts


def redistribute_stages(
    layers: int,
    stages: Sequence[tuple[int, int]],
    layer_time: float,
    extra: Sequence[float],
    last: int | None = None,
) -> list[int]:
    """Return the layers of every stage such that the slowest rank is as fast as possible.

    Then the slowest stage of each rank is as fast as possible. ``stages`` are (rank, chunk) in the
    order of the data, as in ``Plan``; the other arguments are those of ``redistribute``.

    Raises:
        ValueError: as ``redistribute``.
    """
    ranks = 1 + max(rank for rank, _ in stages)
    if ranks == len(stages):
        return redistribute(layers, len(stages), layer_time, extra, last)
    check_spread(layers, len(stages), (layer_time,), extra, last)
    free = range(len(stages) if last is None else len(stages) - 1)
    counts = [0] * len(stages)
    counts[-1] = last or 0
    work = [0.0] * ranks
    for (rank, _), own, count in zip(stages, extra, counts, strict=True):
        work[rank] += own + count * layer_time
    for rank, share in enumerate(redistribute(layers - sum(counts), ranks, layer_time, work)):
        own_stages = [stage for stage in free if stages[stage][0] == rank]
        others = [extra[stage] for stage in own_stages]
        spread = redistribute(share, len(own_stages), layer_time, others)
        for stage, count in zip(own_stages, spread, strict=True):
            counts[stage] = count
    return counts


def check_spread(
    layers: int,
    stages: int,
    times: Sequence[float],
    extra: Sequence[float],
    last: int | None,
) -> None:
    """Refuse layers that cannot be spread: the errors of ``redistribute``, for any layers' times.

    Raises:
        ValueError: as ``redistribute``.
    """
    if not 0 <= layers <= MOST_LAYERS or stages < 1:
        raise ValueError(
            f"{counted(layers, 'layer')} cannot be spread over {counted(stages, 'stage')}"
        )
    if len(extra) != stages:
        raise ValueError(
            f"{len(extra)} extra times for {counted(stages, 'stage')}: give one for each stage"
        )
    for time in (*times, *extra):
        if not (isfinite(time) and time >= 0):
            raise ValueError(f"{time:g} is no time of a layer or stage: give a number, 0 or more")
    if last is not None and not (layers if stages == 1 else 0) <= last <= layers:
        raise ValueError(
            f"the last of {stages} stages cannot have {last} of {layers} layers: give it "
            + (f"all {layers}" if stages == 1 else f"0 to {layers}")
        )
