"""Iterations of this project's own code on one GPU: rows of docs/reference/own_runs.csv.

python -m tools.predictions.own_runs REPORT/report.json docs/reference/own_runs.csv

writes the rows of a report of ``tools/gpu_report.py`` (section *predicted*) in place of all rows.
Each row is predicted as a dry run predicts it, from its flags.
"""

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Final

from megatron.flags.command import read
from megatron.flags.declare import flag, positional
from megatron.flags.readable import told_as_error
from megatron.planning.forecast_run import RunForecast, forecast_run
from megatron.planning.launch_pace import launch_pace
from megatron.planning.run_plan import make_run_plan
from megatron.run.command_line import parse
from megatron.simulator.costs.accuracy import RunClass, TimeErrors
from megatron.simulator.costs.gpus import GIB, gpu, gpu_of_driver
from tools.gpu_sections.predicted import flags_of
from tools.pages.tables import percent, row

COLUMNS: Final = (
    *("model", "gpu", "iteration_ms", "step_ms", "peak_gib"),
    *("date", "pytorch", "triton", "commit", "command", "flags"),
)
COMMAND: Final = "python tools/gpu_report.py --only machine predicted"

HEADING: Final = (
    "| model | iteration, ms | predicted | error | its step, ms | predicted "
    "| peak, GiB | counted | launches | us each |"
)


@dataclass(frozen=True)
class OwnRun:
    """A row of docs/reference/own_runs.csv.

    Attributes:
        model: its name in the report.
        gpu: the kind of GPU.
        iteration: measured milliseconds of an iteration, the median of three after two.
        step: milliseconds of its step.
        flags: of the run, without a device.
        peak: most GiB of tensors; ``None``: not measured alone.
    """

    model: str
    gpu: str
    iteration: float
    step: float
    flags: str
    peak: float | None = None

    @property
    def kind(self) -> RunClass:
        """The class of runs to which the run belongs."""
        return RunClass(self.gpu, shared=False, across=False)

    @cached_property
    def forecast(self) -> RunForecast:
        """What a dry run predicts."""
        words = [*self.flags.split(), "--dry-run", "--dry-run-gpu", self.gpu]
        config = parse(words, world_size=1, speak=False)
        return forecast_run(config, make_run_plan(config), gpu(self.gpu))

    @property
    def error(self) -> float:
        """Predicted time over measured time, minus 1."""
        return 1e3 * self.forecast.outcome.seconds / self.iteration - 1

    @property
    def line(self) -> str:
        """The line of the run in docs/predictions.md."""
        found = self.forecast
        plan = found.run_plan.plan
        pace = launch_pace(found.timeline, found.counts, plan.microbatches)
        return row(
            self.model,
            f"{self.iteration:.4g}",
            f"{1e3 * found.outcome.seconds:.4g}",
            percent(self.error, "+"),
            f"{self.step:.4g}",
            f"{1e3 * found.outcome.step:.4g}",
            "" if self.peak is None else f"{self.peak:.4g}",
            f"{found.outcome.peak[0] / GIB:.4g}",
            f"{pace.launches:,}",
            f"{1e6 * pace.each:.0f}",
        )


def read_own(path: Path) -> list[OwnRun]:
    """Read the rows.

    Raises:
        ValueError: if the file is no such table.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        return [
            OwnRun(
                row["model"],
                gpu(row["gpu"]).name,
                float(row["iteration_ms"]),
                float(row["step_ms"]),
                row["flags"],
                float(row["peak_gib"]) if row["peak_gib"] else None,
            )
            for row in rows
        ]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no table of own runs: {error}") from error


def errors_of(runs: Sequence[OwnRun]) -> TimeErrors:
    """Return the errors of runs of one class, in percent."""
    errors = [100 * abs(run.error) for run in runs]
    return TimeErrors(len(errors), round(sum(errors) / len(errors), 1), round(max(errors), 1))


def write_own(report: Path, table: Path, day: str) -> None:
    """Write the rows of a report.

    Args:
        report: ``report.json`` of ``tools/gpu_report.py``, with the sections *machine* and
            *predicted*.
        table: file to write.
        day: of the measurement.

    Raises:
        ValueError: if there is no such report, or its GPU has no known data sheet.
    """
    try:
        sections = json.loads(report.read_text(encoding="utf-8"))
        machine, found = (sections[name]["values"] for name in ("machine", "predicted"))
        own = gpu_of_driver(machine["device"])
        versions = day, machine["PyTorch"], machine["triton"], machine["commit"], COMMAND
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(f"{report} is no report of a GPU with its predictions: {error}") from error
    if own is None:
        raise ValueError(f"{report}: {machine['device']} has no known data sheet")
    with table.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for model, row in found.items():
            if isinstance(row["iteration"], float):  # else it ran out of memory
                own_figures = (f"{row[key]:.4g}" for key in ("iteration", "step", "memory"))
                writer.writerow([model, own.name, *own_figures, *versions, flags_of(model)])


@dataclass(frozen=True)
class OwnFlags:
    """What is written."""

    report: Path = positional("report.json of tools/gpu_report.py.", "REPORT")
    table: Path = positional("File to write.", "TABLE")
    date: str | None = flag(None, "Day of the measurement.", unset="today", metavar="YYYY-MM-DD")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    given = read(argv, __doc__, OwnFlags)[OwnFlags]
    write_own(given.report, given.table, given.date or date.today().isoformat())


if __name__ == "__main__":
    with told_as_error(ValueError):
        main()
