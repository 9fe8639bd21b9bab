"""Keep the last weight gradients for the cool-down, and let ranks idle only as long as it pays.

After the last F of a rank, memory becomes free, and the rank has to wait between the backwards that
come from other ranks. Weight gradients that were put off until then can fill these waits. They can
be put off for as many microbatches as the rank can hold. A plan in the order of its block has
already computed these weight gradients, and has nothing left to fill the waits with.

A rank that has a weight gradient to compute may instead wait for a backward that comes in a moment.
The wait helps the ranks that need this backward, and costs the rank idle time. The rank that idles
longest determines the time of the plan, so every rank gets an allowance of idle time. Once the
allowance is spent, the rank starts its weight gradient, and its next backward is late. (The
scheduler of the authors of ZB-V, arXiv 2401.10241, also weighs the idle times of ranks.)
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from megatron.schedules.search.justify import Scheduled, scheduled_by
from megatron.schedules.search.list_schedule import Problem, Rows, Rule

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
    """Yield schedules whose last fillers (passes that no other waits for) give way to all others.

    Args:
        problem: the passes and the limits of memory.
        base: rows that run and keep the limits.
        starts: for every pass number and microbatch, its place in the order of passes.
        work: for every rank, the time that it works.
        affords: returns whether the search may place all passes as many more times as its argument
            says; if so, these placements count as made.
    """
    passes = problem.graph.passes
    parts = (1 + max(item.chunk for item in passes)) * (1 + max(item.slice for item in passes))
    held = int(max(limit.activations for limit in problem.limits) / parts)
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
                found = scheduled_by(problem, base, rule)
                yield found
                if found.span == unlimited:
                    break
                unlimited = unlimited or found.span


def _last_fillers_later(
    problem: Problem, starts: Sequence[Sequence[float]], last: int
) -> list[list[float]]:
    """Return ``starts`` with the fillers of the ``last`` microbatches after all other passes."""
    graph = problem.graph
    first_late, later = graph.microbatches - last, max(map(max, starts))
    return [
        [start + later * (filler and i >= first_late) for i, start in enumerate(row)]
        for row, filler in zip(starts, graph.fillers, strict=True)
    ]
