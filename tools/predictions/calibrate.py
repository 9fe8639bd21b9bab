"""Repeat the calibration of the constants of A100s.

python -m tools.predictions.calibrate docs/reference

Coordinate descent over a grid, from the constants in the code: each constant in turn takes the
value with the least sum of squares of relative errors, until none changes. Errors are those of the
published runs on A100s before 2023 that were not kept out and have fewer than 20 pipeline ranks,
and of the passes of 8 A100s without a split vocabulary: F and B of layers, and the output layers of
128k and 256k. Each table is one turn; the last line is the choice.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from typing import Any, Final

from megatron.flags.command import read
from megatron.flags.declare import positional
from megatron.simulator.costs.gpus import GPUS
from megatron.simulator.costs.launch_time import Rates
from tools.pages.tables import row, tell
from tools.predictions.measured import MeasuredRun, read_measured
from tools.predictions.paper_tables import MEASURED
from tools.predictions.pass_times import measured_times, predicted_times
from tools.predictions.published import Prediction
from tools.predictions.published_runs import FIT_ROWS, PublishedRun, is_fitted, read_published

PUBLISHED: Final = "published_runs.csv"
LARGE: Final = (128_000, 256_000)

GRID: Final[Mapping[str, tuple[float, ...]]] = {
    "product_share": (0.74, 0.77, 0.80, 0.83, 0.86),
    "tile_reads": (20.0, 43.0, 60.0),
    "tile_fill": (32, 64, 96, 128, 160, 192),
    "memory_share": (0.60, 0.65, 0.70, 0.75, 0.80),
    "attention_share": (0.28, 0.32, 0.36, 0.40),
    "gap": (1.5e-6, 3e-6, 5e-6, 7e-6),
}
"""Constants by their names in ``Rates``, in the order of the descent."""


@dataclass(frozen=True)
class Data:
    """What the constants are calibrated with.

    Attributes:
        runs: published iterations.
        passes: measured pass times.
    """

    runs: tuple[PublishedRun, ...]
    passes: tuple[MeasuredRun, ...]

    def errors(self, rates: Rates) -> Iterator[float]:
        """Yield the relative errors with these rates."""
        for run in self.runs:
            [choice] = run.choices
            yield Prediction(replace(run, rates=rates), choice).error
        for each in self.passes:
            predicted = predicted_times(each, rates)
            for name, measured in measured_times(each).items():
                if name in ("F", "B") or each.vocab_size in LARGE:
                    yield predicted[name] / measured - 1

    def squares(self, rates: Rates) -> float:
        """Return the sum of the squares of the errors."""
        return sum(error**2 for error in self.errors(rates))


def read_data(reference: Path) -> Data:
    """Read the rows that are calibrated with.

    Args:
        reference: folder with both tables.

    Raises:
        ValueError: if a file is no such table.
    """
    runs = [
        run
        for index, run in enumerate(read_published(reference / PUBLISHED))
        if run.number in FIT_ROWS and is_fitted(index, run)
    ]
    passes = [run for run in read_measured(reference / MEASURED) if run.method == "baseline"]
    return Data(tuple(runs), tuple(passes))


def changed(rates: Rates, name: str, value: float) -> Rates:
    """Return rates with another value of one constant."""
    change: dict[str, Any] = {name: value}
    return replace(rates, **change)


def turn(data: Data, rates: Rates, name: str) -> Mapping[float, float]:
    """Return the sum of squares for every value that a constant may have.

    Args:
        data: what is calibrated with.
        rates: the other constants.
        name: of the constant.
    """
    return {value: data.squares(changed(rates, name, value)) for value in GRID[name]}


def descend(data: Data, rates: Rates) -> Iterator[tuple[str, Mapping[float, float], Rates]]:
    """Yield every turn: the constant, its sums of squares, and the rates after it."""
    unchanged = 0
    while unchanged < len(GRID):
        for name in GRID:
            sums = turn(data, rates, name)
            best = min(sums, key=sums.__getitem__)
            unchanged = unchanged + 1 if best == getattr(rates, name) else 0
            rates = changed(rates, name, best)
            yield name, sums, rates
            if unchanged == len(GRID):
                return


@dataclass(frozen=True)
class FitFlags:
    """Data."""

    reference: Path = positional(f"Folder with {PUBLISHED} and {MEASURED}.", "REFERENCE")


def main() -> None:
    """Run the command."""
    flags = read(None, __doc__, FitFlags)[FitFlags]
    data, rates = read_data(flags.reference), GPUS["A100"].rates
    count = len(list(data.errors(rates)))
    for name, sums, after in descend(data, rates):
        rates = after
        shares = ((value, f"{100 * sqrt(total / count):.2f} %") for value, total in sums.items())
        tell({row(name, "root of the mean square"): (row(f"{v:g}", s) for v, s in shares)})
        print()
    print(", ".join(f"{name} {getattr(rates, name):g}" for name in GRID))


if __name__ == "__main__":
    main()
