"""Memory and idle time of every rank, gathered once for every record that has them.

A rank's idle share is measured in the last iteration of an interval. It is the share of the time of
the passes in which the rank runs no pass. The time of the passes lasts, on one rank, from its first
wait or pass to the end of its last pass; the longest time of all ranks counts. Ranks begin an
iteration together, so their clocks need not agree.
"""

from math import inf
from typing import Final

import torch

from megatron.parallel.groups import Groups
from megatron.runtime.timeline import Recorder
from megatron.training.metrics.peak_memory import PeakMemory
from megatron.training.metrics.records import RankFigures

_UNKNOWN: Final = -1.0


def busy_and_elapsed(recorder: Recorder) -> tuple[float, float] | None:
    """Return the seconds in which this rank ran passes, and the seconds since its first wait.

    Args:
        recorder: has observed one iteration. If the iteration was abandoned and run again
            (post-validation), the second run counts. On CUDA this function waits for the device.

    Returns:
        Both times, to the end of the last pass; the second time begins with the first wait or pass.
        ``None`` if no pass was observed.
    """
    spans = recorder.spans()
    passes = [span for span in spans if span.lane == "compute"]
    if not passes:
        return None
    again = max(i for i, span in enumerate(passes) if span.label == passes[0].label)
    abandoned, passes = passes[:again], passes[again:]
    after = max((span.end for span in abandoned), default=-inf)
    begin = min(span.start for span in spans if span.lane != "comm" and span.start >= after)
    busy = sum(span.end - span.start for span in passes)
    return busy, max(span.end for span in passes) - begin


def gather_figures(
    groups: Groups, memory: PeakMemory, passes: tuple[float, float] | None
) -> tuple[RankFigures, ...]:
    """Return the figures of all ranks, on every rank; every rank calls it.

    ``passes`` is the result of ``busy_and_elapsed`` on this rank.
    """
    hosts = groups.world_hosts
    busy, elapsed = passes or (_UNKNOWN, _UNKNOWN)
    reserved = _UNKNOWN if memory.reserved is None else float(memory.reserved)
    figures = torch.zeros(hosts.size, 4, dtype=torch.float64)
    figures[hosts.rank] = torch.tensor([memory.held, reserved, busy, elapsed], dtype=torch.float64)
    hosts.all_reduce(figures)  # one message, where gathering objects would take two
    longest = float(figures[:, 3].max())
    return tuple(
        RankFigures(
            rank=rank,
            peak_memory=int(held),
            reserved_memory=None if reserved == _UNKNOWN else int(reserved),
            idle=None if busy == _UNKNOWN else 1 - busy / longest,
        )
        for rank, (held, reserved, busy, _) in enumerate(figures.tolist())
    )
