"""The cases of ``tools/emulate.py``: programs with pass times, simulated beforehand."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Final, NamedTuple

from megatron.commands.simulate_schedule import costs_of_file
from megatron.schedules.costs import Costs
from megatron.schedules.counted import counted
from megatron.schedules.lower import Program, lower
from megatron.schedules.request import Request
from megatron.simulator.exchange import EvenBuckets, Overlap
from megatron.simulator.scenario import Scenario, run
from megatron.simulator.simulate import simulate
from tools.predictions.measured import MeasuredRun, hop_like, read_measured
from tools.predictions.measured_runs import MICROBATCHES, lowered, on_ranks

ALL_AT_THE_END: Final = Overlap()
"""Gradients are reduced after the last pass."""


@dataclass(frozen=True)
class EmulatedCase:
    """One program to emulate.

    Attributes:
        name: name of the case, in the columns of the report.
        program: the program.
        costs: times of its passes and communications.
        unit: seconds of a unit of ``costs``.
        replicas: number of pipelines that run at once.
        buckets: buckets of gradients that the replicas exchange, if there are several.
    """

    name: str
    program: Program
    costs: Costs
    unit: float
    replicas: int = 1
    buckets: EvenBuckets | None = None

    @property
    def ranks(self) -> int:
        """Pipeline ranks."""
        return self.program.plan.ranks

    @cached_property
    def simulated(self) -> float:
        """Seconds that the iteration takes in the simulator."""
        return self.unit * simulate(self.program, self.costs).end


def parse_rows(words: Sequence[str], count: int) -> list[int]:
    """Return the indices of the rows that ``words`` name, as in ``1 3-5`` or ``1,3-5``.

    Raises:
        ValueError: if a word names no row of a table of ``count``.
    """
    rows: list[int] = []
    for word in ",".join(words).split(","):
        first, _, last = word.partition("-")
        if not (first.isdecimal() and (last or first).isdecimal()):
            raise ValueError(f"--rows '{word}': give numbers from 1 on, as in 1,3-5")
        chosen = range(int(first), int(last or first) + 1)
        if not chosen or chosen[0] < 1 or chosen[-1] > count:
            raise ValueError(f"--rows {word}: the table has the rows 1 to {count}")
        rows.extend(row - 1 for row in chosen)
    return rows


def measured_cases(
    path: Path, rows: Sequence[str] | None, microbatches: int | None, ranks: int | None
) -> list[EmulatedCase]:
    """Return cases with the pass times of the measured runs of a table.

    Args:
        path: the table.
        rows: numbers of the runs to take, from 1; by default all runs.
        microbatches: microbatches of an iteration; by default as measured.
        ranks: number of ranks that get these pass times; by default as measured.

    Raises:
        ValueError: for a file that is no table of runs, or rows and ranks that cannot be.
    """
    runs = read_measured(path)
    chosen = range(len(runs)) if rows is None else parse_rows(rows, len(runs))
    return [_measured_case(runs, row, microbatches or MICROBATCHES, ranks) for row in chosen]


def _measured_case(
    runs: Sequence[MeasuredRun], row: int, microbatches: int, ranks: int | None
) -> EmulatedCase:
    run_ = runs[row]
    name = f"{row + 1:>3} {run_.method:<10} {run_.seq_length:>8} {run_.vocab_size:>7}"
    asked = run_ if ranks is None else on_ranks(run_, ranks)
    program, costs = lowered(asked, hop_like(run_, runs), microbatches)
    return EmulatedCase(name, program, costs, unit=1e-6)


class GridSize(NamedTuple):
    """Replicas, and pipeline ranks of each."""

    replicas: int
    ranks: int


def parse_grid(text: str) -> GridSize:
    """Read ``d=4,p=2``.

    Raises:
        ValueError: if the text is no grid.
    """
    sizes = dict(word.partition("=")[::2] for word in text.split(","))
    if sorted(sizes) != ["d", "p"] or not all(n.isdecimal() and int(n) for n in sizes.values()):
        raise ValueError("give replicas and pipeline ranks, as in d=4,p=2")
    return GridSize(int(sizes["d"]), int(sizes["p"]))


def planned_case(
    request: Request,
    path: Path,
    unit: float,
    replicas: int = 1,
    overlap: Overlap = ALL_AT_THE_END,
    offloaded: int = 0,
) -> EmulatedCase:
    """Return the case of a schedule with the costs of a file.

    Args:
        request: request for the plan; its costs are ignored.
        path: the costs, see megatron/simulator/costs/cost_file.py.
        unit: seconds of a unit of the costs.
        replicas: number of pipelines that run at once.
        overlap: exchanges of the replicas, and whether they run beside passes.
        offloaded: number of chunks of every rank whose activations wait on the host.

    Raises:
        ValueError: for a file that holds no costs, costs that do not go with the plan, or that were
            measured with another treatment of the vocabulary; for a plan with fewer chunks.
    """
    costs = costs_of_file(path, request.vocabulary).costs
    request = replace(request, costs=costs)
    plan = run(Scenario(request)).plan
    if offloaded > plan.chunks:
        raise ValueError(
            f"--offload-chunk-num {offloaded} is more than the {counted(plan.chunks, 'chunk')} of "
            "a rank: lower it"
        )
    plan = replace(plan, offloaded=offloaded)
    if request.traits.compares:
        costs = costs.per_chunk(plan.chunks)
    name = f"    {request.schedule:<11} {request.vocabulary:>8} {plan.microbatches:>4}"
    name += f" n={plan.slices}" * (plan.slices > 1) + f" host={offloaded}" * (offloaded > 0)
    program = lower(plan, costs)
    if replicas == 1:
        return EmulatedCase(name, program, costs, unit)
    buckets = EvenBuckets(overlap)
    return EmulatedCase(name, buckets.added_to(program), costs, unit, replicas, buckets)
