"""Memory and idle time of every rank, gathered once for every record that has them.

A rank's idle share is measured in the last iteration of an interval. It is the share of the time of
the passes in which the rank runs no pass. The time of the passes lasts, on one rank, from its first
wait or pass to the end of its last pass; the longest time of all ranks counts. Ranks begin an
iteration together, so their clocks need not agree.

The idle share has parts by reason, which add up to it. ``stages``, ``vocabulary``, ``replicas`` and
``copies`` are waits for a message of another stage, a collective of the vocabulary, gradients or
parameters of replicas, and a copy to or from the host. In ``end`` the rank is done and others are
not. ``other`` is the rest: the host issues a pass late.

A rank computes while it runs passes, but for the waits for collectives within them: of tensor-,
context- and expert-parallel ranks. So the computing time of a rank does not depend on the others.
"""

from collections.abc import Sequence
from math import inf
from typing import Final, NamedTuple

import torch

from megatron.parallel.groups import Groups
from megatron.runtime.timeline import Recorder
from megatron.schedules.needs import HOST_KINDS, REPLICA_KINDS, STAGE_KINDS
from megatron.schedules.passes import PASS_KINDS, PLANNED_KINDS
from megatron.simulator.simulate import Span
from megatron.training.metrics.peak_memory import PeakMemory
from megatron.training.metrics.records import RankFigures

_UNKNOWN: Final = -1.0

WAITS: Final = ("stages", "vocabulary", "replicas", "copies")
"""Reasons for which a rank waits."""

_REASONS: Final = {
    **dict.fromkeys(STAGE_KINDS, "stages"),
    **dict.fromkeys(REPLICA_KINDS, "replicas"),
    **dict.fromkeys(HOST_KINDS, "copies"),
}
"""Kind of communication -> reason of a wait for it; all other kinds are of the vocabulary."""


class PassTimes(NamedTuple):
    """Seconds of one rank in one iteration.

    Attributes:
        busy: in which the rank ran passes.
        elapsed: from its first wait or pass to the end of its last pass.
        waits: in which it waited within that time, for each of ``WAITS``.
        computing: in which it computed, for each of ``PLANNED_KINDS``.
    """

    busy: float
    elapsed: float
    waits: tuple[float, ...] = (0.0,) * len(WAITS)
    computing: tuple[float, ...] = (0.0,) * len(PLANNED_KINDS)


def pass_times(recorder: Recorder) -> PassTimes | None:
    """Return the times of the passes of this rank; ``None`` if no pass was observed.

    Args:
        recorder: has observed one iteration. If the iteration was abandoned and run again
            (post-validation), the second run counts. On CUDA this function waits for the device.
    """
    spans = recorder.spans()
    passes = [span for span in spans if span.lane == "compute"]
    if not passes:
        return None
    again = max(i for i, span in enumerate(passes) if span.label == passes[0].label)
    abandoned, passes = passes[:again], passes[again:]
    after = max((span.end for span in abandoned), default=-inf)
    begin = min(span.start for span in spans if span.lane != "comm" and span.start >= after)
    end = max(span.end for span in passes)
    busy = sum(span.end - span.start for span in passes)
    waits = [span for span in spans if span.lane == "wait" and begin <= span.start < end]
    within = recorder.waits_within()[-len(passes) :]
    return PassTimes(busy, end - begin, _by_reason(waits, end), _by_kind(passes, within))


def _by_reason(waits: Sequence[Span], end: float) -> tuple[float, ...]:
    """Return the seconds of waits before ``end``, for each of ``WAITS``."""
    found = dict.fromkeys(WAITS, 0.0)
    for wait in waits:
        found[_REASONS.get(wait.kind, "vocabulary")] += min(wait.end, end) - wait.start
    return tuple(found.values())


def _by_kind(passes: Sequence[Span], within: Sequence[float]) -> tuple[float, ...]:
    """Return the seconds of passes without the waits within them, for each of ``PLANNED_KINDS``."""
    found: dict[str, float] = dict.fromkeys(PASS_KINDS, 0.0)
    for span, wait in zip(passes, within, strict=True):
        found[span.kind] += span.end - span.start - wait
    return tuple(found[kind] for kind in PLANNED_KINDS)  # U, an update, is in no plan


def gather_figures(
    groups: Groups, memory: PeakMemory, passes: PassTimes | None
) -> tuple[RankFigures, ...]:
    """Return the figures of all ranks, on every rank; every rank calls it.

    ``passes`` is the result of ``pass_times`` on this rank.
    """
    hosts = groups.world_hosts
    own = passes or PassTimes(_UNKNOWN, _UNKNOWN)
    reserved = _UNKNOWN if memory.reserved is None else float(memory.reserved)
    figures = torch.zeros(hosts.size, 4 + len(WAITS) + len(PLANNED_KINDS), dtype=torch.float64)
    figures[hosts.rank] = torch.tensor(
        [memory.held, reserved, own.busy, own.elapsed, *own.waits, *own.computing],
        dtype=torch.float64,
    )
    hosts.all_reduce(figures)  # one message, where gathering objects would take two
    longest = float(figures[:, 3].max())
    return tuple(_figures(rank, row, longest) for rank, row in enumerate(figures.tolist()))


def _figures(rank: int, row: Sequence[float], longest: float) -> RankFigures:
    """Return the figures of a rank from its row of the message; ``longest`` as for ``_shares``."""
    held, reserved, busy, elapsed, *seconds = row
    memory = rank, int(held), None if reserved == _UNKNOWN else int(reserved)
    if busy == _UNKNOWN:
        return RankFigures(*memory)
    waits, computing = tuple(seconds[: len(WAITS)]), seconds[len(WAITS) :]
    return RankFigures(
        *memory,
        idle=1 - busy / longest,
        idle_by_reason=_shares(PassTimes(busy, elapsed, waits), longest),
        computing={k: t for k, t in zip(PLANNED_KINDS, computing, strict=True) if t > 0},
    )


def _shares(own: PassTimes, longest: float) -> dict[str, float]:
    """Return the parts of a rank's idle share by reason; ``longest``: seconds that all take."""
    seconds = dict(zip(WAITS, own.waits, strict=True))
    seconds["end"] = longest - own.elapsed
    seconds["other"] = own.elapsed - own.busy - sum(own.waits)
    return {reason: length / longest for reason, length in seconds.items()}
