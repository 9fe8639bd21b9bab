"""Calibrate constants on the iterations of 2024 to 2026, and validate them on what is left out.

python -m tools.predictions.calibrate_shared docs/reference
python -m tools.predictions.calibrate_shared docs/reference --update docs/predictions.md

The constants are those of ``STAGES``, a few for each generation of GPUs. They are fitted by
coordinate descent over a grid to the least mean square of relative errors, in which every family of
models weighs the same. Then each family is left out in turn, and each number of GPUs: the rest is
fitted, and the error of what was left out is told.

The share of the memory's bandwidth is not fitted: one H200 attained 0.78 to 0.85.

A time with other constants is the time of predicted_2026.csv times the ratio of the fullest rank's
passes, since idle time and the exchange with replicas grow with the passes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import sqrt
from pathlib import Path
from typing import Any, Final

from megatron.flags.command import read
from megatron.flags.declare import positional
from megatron.flags.readable import told_as_error
from megatron.simulator.costs.cluster import Cluster
from megatron.simulator.costs.launch_time import Rates
from tools.pages.tables import Errors, tell, update_flag
from tools.pages.tables import row as row_of
from tools.predictions.shared_runs import SHARED, SharedRun, read_shared
from tools.predictions.shared_tables import PREDICTED, class_of, read_predicted
from tools.predictions.shared_times import SharedPrediction

FITTED: Final = "| class | constants | rows | families | error, mean | worst |"
VALIDATED: Final = (
    "| class | rows | family left out: mean | worst | with its sign "
    "| number of GPUs left out: mean | worst |"
)
LEFT: Final = "| class | family left out | rows | error, mean | worst | with its sign |"

Grid = Mapping[str, tuple[float, ...]]
Constants = dict[str, float]


@dataclass(frozen=True)
class Stage:
    """Constants of a generation, and the rows to which they are fitted.

    Attributes:
        name: in the tables.
        takes: whether a row is of the class.
        grid: values that each constant may take, by its name in ``Rates``.
        after: the stage whose constants hold for the others; ``None``: those of the code.
    """

    name: str
    takes: Callable[[SharedRun], bool]
    grid: Grid
    after: str | None = None


def _of(kind: str, *gpus: str) -> Callable[[SharedRun], bool]:
    """Return whether a row is of a kind, on one of these GPUs."""
    return lambda run: class_of(run).endswith(kind) and run.gpu.name in gpus


GAPS: Final = (3e-6, 5e-6, 1e-5, 1.5e-5, 2e-5, 3e-5, 4e-5, 5e-5, 6e-5)
SHARES: Final = (0.50, 0.54, 0.58, 0.60, 0.62, 0.64, 0.66, 0.68, 0.70, 0.74, 0.78, 0.82)
STAGES: Final = (
    Stage(
        "H100, bf16, dense",
        _of("bf16, dense", "H100"),
        {
            "product_share": SHARES,
            "attention_share": (0.32, 0.4, 0.45, 0.5, 0.55),  # this code attained 0.46
        },
    ),
    Stage(
        "H100, 8 bits, dense",
        _of("8 bits, dense", "H100"),
        {"eight_bits": (1.4, 1.5, 1.6, 1.7, 1.8, 1.9)},
        "H100, bf16, dense",
    ),
    Stage(
        "B200 and GB200, 8 bits, dense",
        _of("8 bits, dense", "B200", "GB200"),
        {"product_share": SHARES},
        "H100, 8 bits, dense",
    ),
    Stage(
        "B300 and GB300, 8 bits, dense",
        _of("8 bits, dense", "B300", "GB300"),
        {"product_share": SHARES},
        "H100, 8 bits, dense",
    ),
    Stage("H100, mixtures", _of("mixtures", "H100"), {"gap": GAPS}, "H100, 8 bits, dense"),
    Stage(
        "B200 and GB200, mixtures",
        _of("mixtures", "B200", "GB200"),
        {"gap": GAPS},
        "B200 and GB200, 8 bits, dense",
    ),
    Stage(
        "B300 and GB300, mixtures",
        _of("mixtures", "B300", "GB300"),
        {"gap": GAPS},
        "B300 and GB300, 8 bits, dense",
    ),
)
"""What is fitted, in order: a later stage begins from the constants of an earlier one."""


@dataclass(frozen=True)
class Scaled:
    """A row whose predicted time follows from other constants.

    Attributes:
        run: the row.
        seconds: predicted with the constants of the code, of the source's program.
    """

    run: SharedRun
    seconds: float
    _known: dict[Rates, float] = field(default_factory=dict, compare=False, repr=False)

    def error(self, rates: Rates) -> float:
        """Return the relative error with these rates."""
        if rates not in self._known:
            longer = self._passes(rates) / self._now
            self._known[rates] = self.seconds * longer / self.run.seconds - 1
        return self._known[rates]

    @cached_property
    def _prediction(self) -> SharedPrediction:
        return SharedPrediction(self.run)

    @cached_property
    def _now(self) -> float:
        return self._passes(self.run.gpu.rates)

    def _passes(self, rates: Rates) -> float:
        """Return the seconds of the passes of a microbatch on the rank that takes the longest."""
        found = self._prediction
        cluster: Cluster = replace(found.cluster, rates=rates)
        known: dict[int, float] = {}
        longest = 0.0
        for count in found.source_counts:
            total = 0.0
            for own in count.passes.values():
                for work, times in own.parts:
                    if id(work) not in known:
                        known[id(work)] = cluster.seconds(work)
                    total += times * known[id(work)]
            longest = max(longest, total)
        return longest


def rates_of(run: SharedRun, constants: Constants) -> Rates:
    """Return the rates of a row's GPU with other constants."""
    change: dict[str, Any] = dict(constants)
    return replace(run.gpu.rates, **change)


def errors(rows: Sequence[Scaled], constants: Constants) -> list[float]:
    """Return the relative errors of rows."""
    return [row.error(rates_of(row.run, constants)) for row in rows]


def score(rows: Sequence[Scaled], constants: Constants) -> float:
    """Return the root of the mean square, in which every family weighs the same."""
    families: dict[str, list[float]] = {}
    for row, error in zip(rows, errors(rows, constants), strict=True):
        families.setdefault(row.run.model.family, []).append(error**2)
    means = [sum(squares) / len(squares) for squares in families.values()]
    return sqrt(sum(means) / len(means))


def fitted(rows: Sequence[Scaled], begin: Constants, grid: Grid) -> Constants:
    """Return the constants at which no other value of one of them does better."""
    best = {name: begin[name] for name in begin}
    changed = True
    while changed:
        changed = False
        for name, values in grid.items():
            found = min(values, key=lambda value: score(rows, {**best, name: value}))
            if score(rows, {**best, name: found}) < score(rows, best) - 1e-9:
                best, changed = {**best, name: found}, True
    return best


def begin_of(stage: Stage, known: Mapping[str, Constants], rows: Sequence[Scaled]) -> Constants:
    """Return the constants from which a stage begins: of an earlier one, or of the code."""
    now = rows[0].run.gpu.rates
    own = {name: float(getattr(now, name)) for name in stage.grid}
    return {**own, **(known[stage.after] if stage.after else {})}


@dataclass(frozen=True)
class Left:
    """What was left out, and its errors by constants that were fitted to the rest."""

    name: str
    errors: Sequence[float]


def left_out(
    rows: Sequence[Scaled], begin: Constants, grid: Grid, key: Callable[[SharedRun], str]
) -> Iterator[Left]:
    """Yield every group of rows with its errors by the constants of the other groups.

    If there is one group, nothing is fitted: its errors are those of ``begin``.
    """
    for name in sorted({key(row.run) for row in rows}):
        own = [row for row in rows if key(row.run) == name]
        others = [row for row in rows if key(row.run) != name]
        constants = fitted(others, begin, grid) if others else begin
        yield Left(name, errors(own, constants))


def family_of(run: SharedRun) -> str:
    """Return the family of a row's model."""
    return run.model.family


def gpus_of(run: SharedRun) -> str:
    """Return the number of GPUs of a row."""
    return f"{run.gpus:5}"


def read_scaled(reference: Path) -> list[Scaled]:
    """Read the rows and their predicted times.

    Raises:
        ValueError: if a file is no such table.
    """
    times = {row.number: row.source for row in read_predicted(reference / PREDICTED)}
    runs, _ = read_shared(reference / SHARED)
    return [Scaled(run, times[run.number]) for run in runs if run.number in times]


def tables(rows: Sequence[Scaled], stages: Sequence[Stage] = STAGES) -> Mapping[str, list[str]]:
    """Return the lines of every table, by its heading."""
    known: dict[str, Constants] = {}
    told: dict[str, list[str]] = {FITTED: [], VALIDATED: [], LEFT: []}
    for stage in stages:
        own = [row for row in rows if stage.takes(row.run)]
        begin = begin_of(stage, known, own)
        known[stage.name] = fitted(own, begin, stage.grid)
        found = Errors(errors(own, known[stage.name]))
        words = ", ".join(f"{name} {known[stage.name][name]:g}" for name in stage.grid)
        families = list(left_out(own, begin, stage.grid, family_of))
        counts = list(left_out(own, begin, stage.grid, gpus_of))
        of_families = Errors([error for left in families for error in left.errors])
        of_counts = Errors([error for left in counts for error in left.errors])
        told[FITTED].append(
            row_of(stage.name, words, len(own), len(families), found.mean, found.worst)
        )
        told[VALIDATED].append(
            row_of(
                stage.name,
                len(own),
                *(of_families.mean, of_families.worst, of_families.signed),
                *(of_counts.mean, of_counts.worst),
            )
        )
        for left in families:
            rest = Errors(left.errors)
            size = len(left.errors)
            told[LEFT].append(
                row_of(stage.name, left.name, size, rest.mean, rest.worst, rest.signed)
            )
    return told


@dataclass(frozen=True)
class SharedFitFlags:
    """Data."""

    reference: Path = positional(f"Folder with {SHARED} and {PREDICTED}.", "REFERENCE")
    update: Path | None = update_flag()


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    given = read(argv, __doc__, SharedFitFlags)[SharedFitFlags]
    tell(tables(read_scaled(given.reference)), given.update)


if __name__ == "__main__":
    with told_as_error(ValueError):
        main()
