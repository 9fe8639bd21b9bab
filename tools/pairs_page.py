#!/usr/bin/env python3
"""Predict waits for tensor ranks without and with pairs: a table of docs/choosing-a-schedule.md.

python tools/pairs_page.py [--update]

It predicts with the dry run's cost model, and runs nothing.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.commands.environment import in_environment

with in_environment():
    from megatron.flags.command import read
    from megatron.flags.declare import flag
    from megatron.planning.forecast_run import RunForecast
    from megatron.planning.where_time_goes import where_time_goes
    from megatron.simulator.costs.gpus import GIB
    from tools.pages import tables
    from tools.pages.tables import percent, row, table
    from tools.predictions.scenarios import Scenario

TOOL: Final = "pairs_page.py"
PAIRS: Final = "--tp-comm-overlap"
COLUMNS: Final = (
    *("GPUs", "model", "t, p, c", "V", "schedule", "predicted s", "with pairs"),
    *("predicted waits for tensor ranks", "with pairs", "predicted idle", "with pairs"),
    *("predicted GiB", "with pairs"),
)

PUBLISHED: Final = Scenario(
    "70B", pipeline=4, tensor=4, context=2, replicas=2, seq_length=8192, samples=128
)
"""The layout in which NVIDIA measured Llama 3.1 70B on 64 H100."""
EIGHT: Final = Scenario("70B", pipeline=4, tensor=8, seq_length=8192, samples=32)
LIMIT: Final = "--zero-bubble-max-pending-backward"

JOBS: Final = (
    PUBLISHED._replace(schedule="interleaved/5", treatment="none"),
    PUBLISHED._replace(schedule="interleaved/5"),
    PUBLISHED._replace(schedule="zb-v"),
    PUBLISHED._replace(schedule="dualpipe-v"),
    EIGHT._replace(schedule="interleaved/5"),
    EIGHT._replace(schedule="zb-v"),
    EIGHT._replace(schedule="dualpipe-v"),
    EIGHT._replace(schedule="1f1b"),
    EIGHT._replace(schedule="1f1b", more=f"{LIMIT} 9"),
)


class Figures(NamedTuple):
    """The predicted figures of a job.

    Attributes:
        seconds: of an iteration.
        tensor: share of them in which passes wait for collectives of tensor ranks.
        idle: share of them in which ranks wait for work of other ranks.
        memory: GiB of the rank that holds the most.
    """

    seconds: float
    tensor: float
    idle: float
    memory: float

    @classmethod
    def of(cls, found: RunForecast) -> "Figures":
        """Return the figures of a forecast."""
        seconds, reasons = found.outcome.seconds, where_time_goes(found)
        memory = max(found.outcome.peak) / GIB
        return cls(seconds, reasons["tensor"] / seconds, reasons["idle"] / seconds, memory)


def job_row(job: Scenario) -> str:
    """Return the row of a job, without and with pairs."""
    both = [Figures.of(own.forecast) for own in (job, job._replace(more=f"{job.more} {PAIRS}"))]
    gpus = job.pipeline * job.tensor * job.context * job.replicas
    limit = job.more.removeprefix(LIMIT).strip()
    schedule = f"`{job.schedule}`" + (f", limit {limit}" if limit else "")
    cells = [
        *(f"{own.seconds:.2f}" for own in both),
        *(percent(own.tensor) for own in both),
        *(percent(own.idle) for own in both),
        *(f"{own.memory:.1f}" for own in both),
    ]
    layout = f"{job.tensor}, {job.pipeline}, {job.context}"
    return row(f"{gpus} {job.gpu}", job.model, layout, job.treatment, schedule, *cells)


def lines() -> Iterator[str]:
    """Yield the lines of the table."""
    yield from table(COLUMNS, (), "lllllr")
    yield from map(job_row, JOBS)


@dataclass(frozen=True)
class PageFlags:
    """Tables."""

    update: bool = flag(False, "Write the table into the page.")


def main() -> None:
    """Predict all rows, and print or write the table."""
    flags = read(None, __doc__, PageFlags)[PageFlags]
    tables.put(["\n".join(lines())], TOOL, update=flags.update)


if __name__ == "__main__":
    main()
