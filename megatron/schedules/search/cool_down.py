"""Keep the last weight gradients for the cool-down, and idle only as long as that pays.

After the last F of a rank, memory is free, and the rank has to wait between the backwards that come
from other ranks. Weight gradients that were put off until then fill these waits: those of as many
microbatches as a rank can hold. A plan in the order of its block has computed them before, and has
nothing left to fill the waits with.

A rank that has a weight gradient to do may also wait for a backward that comes in a moment. That
helps the ranks after it, and costs the rank idle time. What counts is the rank that idles longest,
so each gets an allowance of idle time. Once it is spent, the rank works on, and its next backward
is late. (The authors' scheduler of ZB-V, arXiv 2401.10241, weighs the idle times of ranks too.)
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from megatron.schedules.search.justify import Scheduled, scheduled
from megatron.schedules.search.list_schedule import Problem, Rows, Rule, list_schedule

_FILLER_SLACKS: Final = (0.0, 0.5)
_SHARES: Final = (1.0, 0.95, 0.9, 0.8, 0.65, 0.5)
"""Allowances to try, as shares of the longest idle time without any; the first has none."""


def cooled_down(
    problem: Problem,
    base: Rows,
    starts: Sequence[Sequence[float]],
    work: Sequence[float],
    affords: Callable[[int], bool],
) -> Iterator[Scheduled]:
    """Yield schedules whose last fillers give way to all other passes.

    Args:
        problem: the passes and the limits of memory.
        base: rows that run and keep the limits.
        starts: for every pass number and microbatch, its place in the order of passes.
        work: for every rank, the time that it works.
        affords: whether the search may place all passes so many times more; if so, it counts them.
    """
    chunks = 1 + max(item.chunk for item in problem.graph.passes)
    held = int(max(limit.activations for limit in problem.limits) / chunks)
    for last in (held, held - 1):
        keys = _last_fillers_later(problem, starts, last)
        for filler_slack in _FILLER_SLACKS:
            unlimited = 0.0
            for share in _SHARES:
                if not affords(1):
                    return
                span = max(work) + share * (unlimited - max(work))
                idle = [span - own for own in work] if unlimited else ()
                rule = Rule(0.0, filler_slack, keys=keys, idle=idle)
                found = scheduled(problem, list_schedule(problem, base, rule))
                yield found
                if found.span == unlimited:
                    break
                unlimited = unlimited or found.span


def _last_fillers_later(
    problem: Problem, starts: Sequence[Sequence[float]], last: int
) -> list[list[float]]:
    """Return ``starts`` in which the fillers of the ``last`` microbatches come after all others."""
    graph = problem.graph
    first_late, later = graph.microbatches - last, max(map(max, starts))
    return [
        [start + later * (filler and i >= first_late) for i, start in enumerate(row)]
        for row, filler in zip(starts, graph.fillers, strict=True)
    ]
