"""What passes wait for in pairs, beside times that were measured.

A measurement tells how long a pass takes alone, and not where it waits for collectives. Without its
waits a pass hides nothing in a pair, so a plan from measured times would have no pairs. A count of
the code knows the waits, and what passes do in turns.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron.schedules.costs import Costs, Time
from megatron.schedules.passes import PassKind


def with_planned_waits(measured: Costs, planned: Costs) -> Costs:
    """Return measured costs with waits, in the shares that a count predicts.

    A pass waits for the same share of its measured time as of its planned time. What it does in
    turns stays as counted: of these steps only ratios matter (``pair_time.joined_time``). If the
    planned costs have no waits, as those in FLOPs, the result is ``measured``.

    Args:
        measured: seconds of passes by rank and chunk.
        planned: seconds of the same ranks and chunks.
    """
    if not any(_any(time) for time in planned.waits.values()):
        return measured
    waits = dict[PassKind, Time]()
    for kind, time in planned.waits.items():
        if kind in measured.passes:
            waits[kind] = _shares(measured.passes[kind], time, planned.passes[kind])
    slices = measured.slices
    if len(slices) == len(planned.slices):
        slices = tuple(
            with_planned_waits(own, counted)
            for own, counted in zip(slices, planned.slices, strict=True)
        )
    return replace(
        measured,
        waits=waits,
        journeys=_of(planned.journeys, measured),
        turns=_of(planned.turns, measured),
        slices=slices,
    )


def _of(table: Mapping[PassKind, Any], measured: Costs) -> Mapping[PassKind, Any]:
    """Return the entries for passes that were measured."""
    return {kind: own for kind, own in table.items() if kind in measured.passes}


def _shares(time: Any, wait: Any, planned: Any) -> Any:
    """Return ``time`` * ``wait`` / ``planned``; tables of one form, or numbers for all entries."""
    parts = (time, wait, planned)
    sizes = {len(part) for part in parts if not isinstance(part, (int, float))}
    if not sizes:
        return min(time, time * wait / planned) if planned else 0.0
    (size,) = sizes
    rows = ([part] * size if isinstance(part, (int, float)) else part for part in parts)
    return [_shares(*own) for own in zip(*rows, strict=True)]


def _any(time: Any) -> bool:
    return time > 0 if isinstance(time, (int, float)) else any(map(_any, time))
