"""A plan that holds as many microbatches as it has: all forwards run first, on every rank.

No schedule trains with it. Its memory tells what a rank holds with so many microbatches in flight.
"""

from dataclasses import replace
from typing import Final

from megatron.schedules.passes import Pass, PassKind
from megatron.schedules.plan import Plan

_PHASES: Final[tuple[tuple[PassKind, ...], ...]] = (
    ("IF", "F"),
    ("S", "E", "T"),
    ("R", "B"),
    ("W",),
    ("IB",),
)
"""Passes that stand together: those of one phase of all microbatches, then those of the next."""


def forwards_first(one: Plan, microbatches: int) -> Plan:
    """Return a plan with the passes of a plan of one microbatch for each of ``microbatches``.

    Every rank runs all forwards, then the output layer, all backwards and all weight gradients. In
    a phase the passes of a microbatch stand as they do in ``one``. So before its first backward a
    rank holds all that a forward leaves of every microbatch, and before its first weight gradient
    all that a backward leaves.
    """
    rows = tuple(
        tuple(
            item._replace(microbatch=number)
            for phase in _PHASES
            for number in range(microbatches)
            for item in _of_phase(row, phase)
        )
        for row in one.rows
    )
    return replace(one, microbatches=microbatches, rows=rows, pairs=frozenset(), offloaded=0)


def _of_phase(row: tuple[Pass, ...], phase: tuple[PassKind, ...]) -> list[Pass]:
    return [item for item in row if item.kind in phase]
