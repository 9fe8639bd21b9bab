"""Slow down passes while collectives are under way.

A rank issues a collective as early as it can. From then on the collective's kernel occupies some
multiprocessors, even while it waits for other ranks. A pass during the collective has only the
remaining multiprocessors.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Final

from megatron.schedules.costs import Costs, Time
from megatron.schedules.needs import REPLICA_KINDS, CommKind
from megatron.simulator.clocks import Clocks

CHANNELS: Final = 16
"""Multiprocessors that a collective's kernel occupies. Assumed, not fitted: 16 of an A100's 108. By
this, F and B of the runs on 8 A100s (docs/reference/a100_8gpu_seq2048.csv) are 6.6 to 7.0 % slower
with vocab-1 than without vocabulary passes, 5.4 to 6.2 % with vocab-2 and 5.5 to 6.7 % interlaced,
means over the inner ranks. Measured: 6.4, 6.6 and 2.7 %."""

_VOCABULARY: Final[tuple[CommKind, ...]] = ("C0", "C1", "C2", "C3", "CIF", "CIB")
"""Transfers are not counted: a transfer has fewer channels, and is under way in the runs compared
with, too."""

Interval = tuple[float, float]


def crowded(alone: Clocks, costs: Costs, share: float, replicas: float = 0.0) -> Costs:
    """Return costs in which passes during collectives are slower.

    Args:
        alone: the program of an iteration, simulated with ``costs``.
        costs: the costs of passes that have the GPU alone.
        share: share by which a pass is slower during a collective of the vocabulary. It is the
            share of all multiprocessors that the collective's kernel occupies. In Megatron-LM the
            kernel occupies ``CHANNELS`` multiprocessors.
        replicas: share by which a pass is slower during a collective with replicas.
    """
    works = [alone.work(rank) for rank in range(alone.ranks)]
    slower = [0.0] * alone.ranks
    for kinds, own in ((_VOCABULARY, share), (REPLICA_KINDS, replicas)):
        if own:
            for rank, time in enumerate(occupied(alone, kinds)):
                slower[rank] += own * time / max(works[rank], time) if time else 0.0
    if not any(slower):
        return costs
    return _slower(costs, [1 + own for own in slower])


def _slower(costs: Costs, factors: Sequence[float]) -> Costs:
    """Return costs in which every pass is longer by the factor of its rank, and so its slices."""
    passes = dict(costs.passes)
    for kind, alone in costs.passes.items():
        if kind != "U":  # U moves bytes, and multiplies nothing
            passes[kind] = _scaled(alone, factors)
    slices = tuple(_slower(own, factors) for own in costs.slices)
    return replace(costs, passes=passes, slices=slices)


def occupied(clocks: Clocks, kinds: Collection[CommKind] = _VOCABULARY) -> list[float]:
    """Return for every rank the time in which its passes run during a collective."""
    ranks = range(clocks.ranks)
    return [_common(clocks.passes(rank), _under_way(clocks, rank, kinds)) for rank in ranks]


def _under_way(clocks: Clocks, rank: int, kinds: Collection[CommKind]) -> list[Interval]:
    """Return the intervals in which collectives are under way, in order and without overlap."""
    numbered, begins, ends = clocks.numbered, clocks.begins, clocks.ends
    of_kinds = [comm.kind in kinds for comm in numbered.comms]
    clock = busy_until = 0.0
    found: list[Interval] = []
    for number, after in zip(numbered.rows[rank], clocks.after[rank], strict=True):
        if number >= 0:
            clock = after
            continue
        starts = number & 1
        comm = (-number >> 1) - (not starts)
        end = ends[comm] if ends[comm] > begins[comm] else clock
        if not starts:
            clock = max(clock, end)
        elif of_kinds[comm]:
            start = max(clock, busy_until)
            if end > start:
                found.append((start, end))
                busy_until = end
    return found


def _common(passes: Sequence[Interval], others: Sequence[Interval]) -> float:
    """Return the time common to both; the intervals of each are in order and do not overlap."""
    total, at = 0.0, 0
    for start, end in passes:
        while at < len(others) and others[at][1] <= start:
            at += 1
        index = at
        while index < len(others) and others[index][0] < end:
            total += min(end, others[index][1]) - max(start, others[index][0])
            index += 1
    return total


def _scaled(time: Time, factors: Sequence[float]) -> Time:
    """Return times by rank, each multiplied by its rank's factor."""
    if isinstance(time, (int, float)):
        return [time * factor for factor in factors]
    rows = ([own] if isinstance(own, (int, float)) else own for own in time)  # a rank's chunks
    return [[each * factor for each in row] for row, factor in zip(rows, factors, strict=True)]
