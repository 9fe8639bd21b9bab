"""Slow down passes while collectives are under way.

A rank issues a collective as early as it can. From then on the collective's kernel occupies some
multiprocessors, even while it waits for other ranks. A pass during the collective has only the
remaining multiprocessors.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final

from megatron.schedules.costs import Costs, Time
from megatron.schedules.lower import Instruction, Program, Run, Start
from megatron.schedules.needs import REPLICA_KINDS, CommKind
from megatron.simulator.simulate import Timeline, simulate

CHANNELS: Final = 16
"""Multiprocessors that a collective's kernel occupies. Assumed, not fitted: 16 of an A100's 108. By
this, F and B of the runs on 8 A100s (docs/reference/a100_8gpu_seq2048.csv) are 6.6 to 7.0 % slower
with vocab-1 than without vocabulary passes, 5.4 to 6.2 % with vocab-2 and 5.5 to 6.7 % interlaced,
means over the inner ranks. Measured: 6.4, 6.6 and 2.7 %."""

_VOCABULARY: Final[tuple[CommKind, ...]] = ("C0", "C1", "C2", "C3", "CIF", "CIB")
"""Transfers are not counted: a transfer has fewer channels, and is under way in the runs compared
with, too."""

Interval = tuple[float, float]


def crowded(program: Program, costs: Costs, share: float, replicas: float = 0.0) -> Costs:
    """Return costs in which passes during collectives are slower.

    Args:
        program: the program of an iteration.
        costs: the costs of passes that have the GPU alone.
        share: share by which a pass is slower during a collective of the vocabulary. It is the
            share of all multiprocessors that the collective's kernel occupies. In Megatron-LM the
            kernel occupies ``CHANNELS`` multiprocessors.
        replicas: share by which a pass is slower during a collective with replicas.
    """
    timeline = simulate(program, costs)
    works = [timeline.work(rank) for rank in range(timeline.ranks)]
    slower = [0.0] * timeline.ranks
    for kinds, own in ((_VOCABULARY, share), (REPLICA_KINDS, replicas)):
        if own:
            for rank, time in enumerate(occupied(program, timeline, kinds)):
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


def occupied(
    program: Program, timeline: Timeline, kinds: Collection[CommKind] = _VOCABULARY
) -> list[float]:
    """Return for every rank the time in which its passes run during a collective."""
    ends = {span.label: span.end for span in timeline.spans if span.lane == "comm"}
    found = []
    for rank, row in enumerate(program.rows):
        passes = {span.label: (span.start, span.end) for span in timeline.compute(rank)}
        under_way = _under_way(row, passes, ends, kinds)
        found.append(_common(list(passes.values()), under_way))
    return found


def _under_way(
    row: Sequence[Instruction],
    passes: Mapping[str, Interval],
    ends: Mapping[str, float],
    kinds: Collection[CommKind],
) -> list[Interval]:
    """Return the intervals in which collectives are under way, in order and without overlap."""
    clock = 0.0
    found: list[Interval] = []
    for step in row:
        if isinstance(step, Run):
            clock = passes[str(step.passes[-1])][1]
            continue
        end = ends.get(str(step.comm), clock)
        if not isinstance(step, Start):
            clock = max(clock, end)
        elif step.comm.kind in kinds:
            start = max(clock, found[-1][1]) if found else clock
            if end > start:
                found.append((start, end))
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
