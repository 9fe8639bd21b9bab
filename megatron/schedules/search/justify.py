"""Shorten a schedule by pushing its passes to and fro: first to the right, then to the left.

The first step schedules backwards in time and puts each pass as late as possible. The second
schedules forwards and puts each pass as early as possible. Project scheduling calls this
justification (Wiest 1964; Li and Willis 1992). It suits pipelines because their two ends mirror
each other: forwards fill the warm-up, and weight gradients fill the cool-down. In the reversed
pipeline, weight gradients play the role of forwards.
"""

from collections.abc import Sequence
from typing import NamedTuple

from megatron.schedules.search.list_schedule import Problem, Rows, Rule, listed
from megatron.schedules.timing import longest_span, walk, working


class Scheduled(NamedTuple):
    """Rows and their times.

    Attributes:
        span: the longest time between a rank's first start and last end; passes that take no time
            do not count (arXiv 2401.10241, section 5.3).
        end: the end of the last pass.
        rows: the rows of passes.
        starts: the start of every pass in ``rows``.
        ends: the end of every pass in ``rows``.
    """

    span: float
    end: float
    rows: Rows
    starts: list[list[float]]
    ends: list[list[float]]


def scheduled(problem: Problem, rows: Rows) -> Scheduled:
    """Return ``rows`` with their earliest times."""
    run = walk(problem.graph, rows)
    assert not run.stuck, "rows run"
    return _timed(rows, run.starts, run.ends)


def scheduled_by(problem: Problem, base: Rows, rule: Rule) -> Scheduled:
    """Return the rows that list scheduling makes of ``base``, with their earliest times."""
    found = listed(problem, base, rule)
    if found.is_earliest:
        return _timed(found.rows, found.starts, found.ends)
    return scheduled(problem, found.rows)


def _timed(rows: Rows, starts: list[list[float]], ends: list[list[float]]) -> Scheduled:
    span = longest_span(working(s, e) for s, e in zip(starts, ends, strict=True))
    return Scheduled(span, max(e[-1] for e in ends), rows, starts, ends)


def planned(problem: Problem, rows: Rows, starts: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the start of every pass, by its number and microbatch."""
    m = problem.graph.microbatches
    table = [[0.0] * m for _ in problem.graph.passes]
    for row, times in zip(rows, starts, strict=True):
        for item, time in zip(row, times, strict=True):
            table[item // m][item % m] = time
    return table


def to_the_left(problem: Problem, base: Scheduled, slack: float) -> Scheduled:
    """Return ``base`` with every pass as early as possible."""
    rule = Rule(slack, planned=planned(problem, base.rows, base.starts))
    return scheduled_by(problem, base.rows, rule)


def justify(problem: Problem, base: Scheduled, slacks: Sequence[float]) -> Scheduled:
    """Return the shortest schedule: ``base``, or a schedule that the pushes to and fro make.

    Args:
        problem: the passes and the limits of memory.
        base: the schedule to start from.
        slacks: for every push to and fro, the ``slack`` of its ``Rule``.
    """
    mirror = problem.reversed()
    best = current = base
    for slack in slacks:
        late = _mirrored(mirror, current)
        times = zip(current.starts, current.ends, strict=True)
        firsts = [(working(starts, ends) or starts)[0] for starts, ends in times]
        rule = Rule(
            slack,
            planned=planned(mirror, late.rows, late.starts),
            begin=[max(firsts) - first for first in firsts],
        )
        late = scheduled_by(mirror, late.rows, rule)
        current = to_the_left(problem, _mirrored(problem, late), slack)
        best = min(best, current, key=lambda s: (s.span, s.end))
    return best


def _mirrored(problem: Problem, base: Scheduled) -> Scheduled:
    """Return ``base`` with time running the other way."""
    m = problem.graph.microbatches
    # With time reversed the last microbatch is the first: i becomes m - 1 - i.
    rows = [[item - 2 * (item % m) + m - 1 for item in reversed(row)] for row in base.rows]
    starts = [[base.end - time for time in reversed(row)] for row in base.ends]
    ends = [[base.end - time for time in reversed(row)] for row in base.starts]
    return Scheduled(base.span, base.end, rows, starts, ends)
