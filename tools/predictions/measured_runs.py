"""Programs of measured runs, made to predict and emulate the runs from their pass times."""

from collections.abc import Sequence
from dataclasses import replace

from megatron.schedules.costs import Costs
from megatron.schedules.lower import Program, lower
from megatron.schedules.make_plan import make_plan
from tools.predictions.measured import METHODS, MeasuredRun

MICROBATCHES = 128
"""Of an iteration of the measured runs."""


def lowered(
    run: MeasuredRun, hop: float, microbatches: int, share_of_s: float | None = None
) -> tuple[Program, Costs]:
    """Return the program of an iteration like that of ``run``, and its costs in microseconds.

    The code that was measured ran the passes of 1F1B in the order of its block: idle time is not
    filled.

    Args:
        run: measured pass times.
        hop: microseconds of a message between neighbours.
        microbatches: microbatches of the iteration.
        share_of_s: share of ST that is S; by default that of its matrix products.
    """
    costs = run.costs(hop, share_of_s)
    treatment = METHODS[run.method]
    plan = make_plan("1f1b", treatment, run.ranks, microbatches, costs, shortened=False)
    return lower(plan, costs), costs


def on_ranks(run: MeasuredRun, ranks: int) -> MeasuredRun:
    """Return ``run`` as it would have been on ``ranks`` ranks with the same pass times.

    The first and the last rank keep their times. The ranks between them repeat the times measured
    between the first and the last.

    Raises:
        ValueError: if there are no such times.
    """
    if ranks == run.ranks:
        return run
    if min(ranks, run.ranks) < 3:
        raise ValueError(
            f"the times of {run.ranks} ranks cannot become those of {ranks}: both need ranks "
            "between the first and the last"
        )
    return replace(run, times={name: _spread(times, ranks) for name, times in run.times.items()})


def _spread(times: Sequence[float], ranks: int) -> tuple[float, ...]:
    between = times[1:-1]
    return (times[0], *(between[i % len(between)] for i in range(ranks - 2)), times[-1])
