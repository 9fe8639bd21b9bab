#!/usr/bin/env python3
"""Predict the iterations of docs/reference/published_2026.csv, and sum up the errors.

python -m tools.predictions.shared_tables docs/reference         # all rows, minutes
python -m tools.predictions.shared_tables docs/reference --rows 1268 1290
python -m tools.predictions.shared_tables docs/reference --update docs/predictions.md

``--update`` writes every row into predicted_2026.csv beside the table, and the sums into the page.
"""

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from megatron.flags.command import read
from megatron.flags.declare import flag, positional
from megatron.flags.ranges import COUNT
from megatron.flags.readable import told_as_error
from tools.pages.tables import Errors, percent, row, tell, update_flag
from tools.predictions.shared_runs import SHARED, SharedRun, read_shared
from tools.predictions.shared_times import SharedPrediction

PREDICTED: Final = "predicted_2026.csv"
COLUMNS: Final = (
    *("id", "model", "gpu", "gpus", "layout", "precision", "class", "family"),
    *("measured_s", "source_s", "error_pct", "ours_s", "gap_pct"),
)
CLASSES: Final = (
    "| runs of others, 2024 to 2026 | rows | families | error, mean | worst | with its sign "
    "| this program longer by |"
)
FAMILIES: Final = (
    "| family | class | rows | error, mean | worst | with its sign | this program longer by |"
)
LEFT_OUT: Final = "| not predicted, because the model or its run | rows |"


@dataclass(frozen=True)
class PredictedRow:
    """A line of predicted_2026.csv.

    Attributes:
        number: its ``id``.
        words: the run, its class and its family, as in ``COLUMNS``.
        measured: seconds of an iteration.
        source: predicted seconds of the source's program, with four digits.
        ours: predicted seconds of this program in the same layout, with four digits.
    """

    number: int
    words: tuple[str, ...]
    measured: float
    source: float
    ours: float

    @classmethod
    def of(cls, run: SharedRun) -> "PredictedRow":
        """Return the predictions of a row."""
        found = SharedPrediction(run)
        layout = (
            f"t {run.tensor} p {run.pipeline} c {run.context} d {run.replicas} e {run.experts} "
            f"v {run.chunks} b {run.micro_batch}"
        )
        gpu, family = run.gpu.name, run.model.family
        words = run.name, gpu, str(run.gpus), layout, run.precision, class_of(run), family
        source, ours = (float(f"{time:.4g}") for time in (found.source, found.ours))
        return cls(run.number, words, run.seconds, source, ours)

    @classmethod
    def read(cls, row: Mapping[str, str]) -> "PredictedRow":
        """Return a line of the file."""
        words = tuple(row[name] for name in COLUMNS[1:8])
        times = (float(row[name]) for name in ("measured_s", "source_s", "ours_s"))
        return cls(int(row["id"]), words, *times)

    @property
    def kind(self) -> str:
        """Its class."""
        return self.words[5]

    @property
    def family(self) -> str:
        """The family of its model."""
        return self.words[6]

    @property
    def error(self) -> float:
        """Predicted time of the source's program over the measured time, minus 1."""
        return self.source / self.measured - 1

    @property
    def gap(self) -> float:
        """Predicted time of this program over that of the source's program, minus 1."""
        return self.ours / self.source - 1

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells of ``COLUMNS``."""
        return (
            str(self.number),
            *self.words,
            f"{self.measured:g}",
            f"{self.source:.4g}",
            f"{100 * self.error:+.1f}",
            f"{self.ours:.4g}",
            f"{100 * self.gap:+.1f}",
        )


def class_of(run: SharedRun) -> str:
    """Return the class of a row: its generation of GPUs, its precision, and whether it has experts.

    The recipes of 8 bits are one class.
    """
    generation = "H100" if run.gpu.name == "H100" else "Blackwell"
    precision = "bf16" if run.precision == "BF16" else "8 bits"
    return f"{generation}, {precision}, {'mixtures' if run.model.mixture else 'dense'}"


def sums(rows: Sequence[PredictedRow], *, families: bool = False) -> Iterator[str]:
    """Yield the lines of ``CLASSES``, or those of ``FAMILIES``."""
    groups: dict[tuple[str, ...], list[PredictedRow]] = {}
    for own in sorted(rows, key=lambda own: (own.kind, own.family)):
        groups.setdefault((own.family, own.kind) if families else (own.kind,), []).append(own)
    for name, group in groups.items():
        found = Errors([own.error for own in group])
        members = () if families else (len({own.family for own in group}),)
        gap = percent(sum(own.gap for own in group) / len(group))
        yield row(*name, len(group), *members, found.mean, found.worst, found.signed, gap)


def left_out_rows(reasons: Mapping[int, str]) -> Iterator[str]:
    """Yield the lines of ``LEFT_OUT``: every reason, and how many rows it keeps out."""
    found = list(reasons.values())
    for reason in sorted(set(found), key=found.count, reverse=True):
        yield row(reason, found.count(reason))


def read_predicted(path: Path) -> list[PredictedRow]:
    """Read predicted_2026.csv.

    Raises:
        ValueError: if the file cannot be read or is no such table.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return [PredictedRow.read(row) for row in csv.DictReader(file)]
    except (OSError, UnicodeDecodeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no table of predictions: {error}") from error


def write_predicted(path: Path, rows: Sequence[PredictedRow]) -> None:
    """Write predicted_2026.csv."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(row.cells for row in rows)


@dataclass(frozen=True)
class SharedFlags:
    """What is predicted."""

    reference: Path = positional(f"Folder with {SHARED}.", "REFERENCE")
    rows: tuple[int, ...] = flag((), "Only these rows, by their id.", COUNT, unset="all")
    update: Path | None = update_flag(
        "--rows", f"Also write {PREDICTED}, and the sums into this page."
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command.

    Raises:
        ValueError: for files that are not such tables.
    """
    given = read(argv, __doc__, SharedFlags)[SharedFlags]
    runs, left_out = read_shared(given.reference / SHARED)
    found = []
    print(*COLUMNS, sep=",")
    for run in runs:
        if given.rows and run.number not in given.rows:
            continue
        found.append(PredictedRow.of(run))
        print(*found[-1].cells, sep=",", flush=True)
    if given.rows:
        return
    if given.update is not None:
        write_predicted(given.reference / PREDICTED, found)
    sums_of = {CLASSES: sums(found), FAMILIES: sums(found, families=True)}
    print()
    tell({**sums_of, LEFT_OUT: left_out_rows(left_out)}, given.update)


if __name__ == "__main__":
    with told_as_error(ValueError):
        main()
