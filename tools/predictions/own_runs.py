"""Iterations of this project's own code on one GPU: rows of docs/reference/own_runs.csv.

Each row is predicted as a dry run predicts it, from its flags. ``tools/gpu_report.py`` measures
such rows (section *predicted*).
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from megatron.config.command_line import parse
from megatron.simulator.costs.accuracy import RunClass, TimeErrors
from megatron.simulator.costs.gpus import gpu
from megatron.training.planning.forecast_run import RunForecast, forecast_run
from megatron.training.planning.launch_pace import launch_pace
from megatron.training.planning.run_plan import make_run_plan

HEADING: Final = (
    "| model | iteration, ms | predicted | error | its step, ms | predicted | launches | us each |"
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
    """

    model: str
    gpu: str
    iteration: float
    step: float
    flags: str

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
        pace = launch_pace(found.timeline, found.memories, plan.microbatches)
        words = (
            self.model,
            f"{self.iteration:.4g}",
            f"{1e3 * found.outcome.seconds:.4g}",
            f"{self.error:+.1%}".replace("%", " %"),
            f"{self.step:.4g}",
            f"{1e3 * found.outcome.step:.4g}",
            f"{pace.launches:,}",
            f"{1e6 * pace.each:.0f}",
        )
        return f"| {' | '.join(words)} |"


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
            )
            for row in rows
        ]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no table of own runs: {error}") from error


def errors_of(runs: Sequence[OwnRun]) -> TimeErrors:
    """Return the errors of runs of one class, in percent."""
    errors = [100 * abs(run.error) for run in runs]
    return TimeErrors(len(errors), round(sum(errors) / len(errors), 1), round(max(errors), 1))
