#!/usr/bin/env python3
"""Predict the tables of arXiv 2411.05288 (MFU and peak memory) from counts, and compare.

python tools/predict_paper.py docs/reference

Each line is a cell of the paper's tables. Times are those of passes as Megatron-LM launches them
(``tools/predictions/vocabulary_runs.py``), with the constants of all other predictions; bytes are
those that Megatron-LM keeps (``vocabulary_memory.py``). ``--update`` writes all tables into the
page that has them, docs/predictions.md; errors of the time belong into
megatron/simulator/costs/accuracy.py.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.flags.command import read
from megatron.flags.declare import flag, positional
from megatron.flags.ranges import COUNT
from megatron.flags.readable import told_as_error
from megatron.simulator.costs.accuracy import RunClass
from tools.pages.tables import row, tell, update_flag
from tools.predictions.paper_tables import (
    GIBIBYTE,
    TABLES,
    VOCABULARIES,
    Cell,
    read_cells,
)
from tools.predictions.vocabulary_memory import peak
from tools.predictions.vocabulary_runs import MACHINE

HEADING: Final = (
    "| schedule | GPUs | sequence | method | V | MFU | predicted | error "
    "| GiB | predicted | error |"
)
ERRORS: Final = (
    "| runs of the paper | number | MFU points, mean | largest | time, mean | largest "
    "| memory, mean | largest |"
)
SIGNED: Final = "| schedule and method | 8 GPUs | 16 | 24 | 32 |"
NUMBERS: Final = (8, 16, 24, 32)
FITTED: Final = (8, 2048)
"""GPUs and sequence of the runs whose pass times the constants were fitted to."""


@dataclass(frozen=True)
class Compared:
    """A cell with its prediction.

    Attributes:
        cell: the cell.
        mfu: predicted MFU, in percent.
        gib: predicted memory of the fullest rank, in GiB.
    """

    cell: Cell
    mfu: float
    gib: float

    @cached_property
    def points(self) -> float:
        """Error of the MFU, in points."""
        assert self.cell.mfu is not None
        return self.mfu - self.cell.mfu

    @property
    def time(self) -> float:
        """Error of the time, in percent."""
        assert self.cell.mfu is not None
        return 100 * (self.cell.mfu / self.mfu - 1)

    @property
    def memory(self) -> float:
        """Error of the memory, in percent."""
        assert self.cell.peak_gib is not None
        return 100 * (self.gib / self.cell.peak_gib - 1)

    @property
    def is_fitted(self) -> bool:
        """Whether constants follow from pass times of this run's kind (``calibrate.py``)."""
        return (self.cell.gpus, self.cell.seq_length) == FITTED

    @property
    def kind(self) -> RunClass:
        """The class of runs to which the cell belongs."""
        return RunClass("A100", shared=False, across=self.cell.gpus > MACHINE)


def compared(cell: Cell) -> Compared:
    """Return a cell with its prediction."""
    return Compared(cell, 100 * cell.counted.mfu, peak(cell.counted) / GIBIBYTE)


def line(own: Compared) -> str:
    """Return a cell's line."""
    cell = own.cell
    words = [cell.schedule, str(cell.gpus), str(cell.seq_length), cell.method, cell.vocabulary]
    if cell.mfu is None:
        words += ["-", f"{own.mfu:.1f}", "", "-", f"{own.gib:.1f}", ""]
    else:
        words += [f"{cell.mfu:.1f}", f"{own.mfu:.1f}", f"{own.points:+.1f}"]
        words += [f"{cell.peak_gib:.1f}", f"{own.gib:.1f}", f"{own.memory:+.1f} %"]
    return row(*words)


def error_rows(found: Sequence[Compared]) -> Iterator[str]:
    """Yield the errors by table and number of GPUs, by class of runs, and of all cells."""
    groups: dict[str, list[Compared]] = {}
    for own in found:
        if own.cell.mfu is not None:
            title = f"{own.cell.schedule}, {own.cell.gpus} GPUs"
            names = [title, own.cell.schedule, str(own.kind), "all"]
            if not (own.is_fitted or own.kind.across):
                names.append(f"{own.kind}, not fitted")
            for name in names:
                groups.setdefault(name, []).append(own)
    for name in sorted(groups, key=lambda name: ("GPUs" not in name, name == "all")):
        each = groups[name]
        words = [name, str(len(each))]
        for unit, errors in (
            ("", [own.points for own in each]),
            (" %", [own.time for own in each]),
            (" %", [own.memory for own in each]),
        ):
            sizes = list(map(abs, errors))
            digits = 1 if unit else 2
            words += [f"{mean(sizes):.{digits}f}{unit}", f"{max(sizes):.{digits}f}{unit}"]
        yield row(*words)


def signed_rows(found: Sequence[Compared]) -> Iterator[str]:
    """Yield the mean errors with their signs, by schedule, method and number of GPUs."""
    ran = [own for own in found if own.cell.mfu is not None]
    for schedule, method in dict.fromkeys((own.cell.schedule, own.cell.method) for own in ran):
        words = [f"{schedule}, {method}"]
        for gpus in NUMBERS:
            points = [
                own.points
                for own in ran
                if (own.cell.schedule, own.cell.method, own.cell.gpus) == (schedule, method, gpus)
            ]
            words.append(f"{mean(points):+.1f}" if points else "")
        yield row(*words)


@dataclass(frozen=True)
class PaperFlags:
    """What is predicted."""

    reference: Path = positional(f"Folder with {' and '.join(TABLES.values())}.", "REFERENCE")
    table: str | None = flag(None, "Only this table.", choices=tuple(TABLES), unset="all")
    gpus: int | None = flag(None, "Only these setups.", COUNT, unset="all")
    seq_length: int | None = flag(None, "Only these setups.", COUNT, unset="all")
    vocab_size: str | None = flag(
        None, "Only these setups.", choices=tuple(VOCABULARIES), unset="all"
    )
    update: Path | None = update_flag("--table or --gpus or --seq-length or --vocab-size")


def _selected(arguments: PaperFlags) -> list[Cell]:
    wanted = {
        "schedule": arguments.table,
        "gpus": arguments.gpus,
        "seq_length": arguments.seq_length,
        "vocabulary": arguments.vocab_size,
    }
    given = {name: value for name, value in wanted.items() if value is not None}
    cells = [
        cell
        for schedule, file in TABLES.items()
        for cell in read_cells(schedule, arguments.reference / file)
        if all(value == getattr(cell, name) for name, value in given.items())
    ]
    if not cells:
        raise ValueError("the tables have no such setup: ask for fewer at once")
    return cells


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command.

    Raises:
        ValueError: for files that are not the paper's tables, or a selection that is empty.
    """
    arguments = read(argv, __doc__, PaperFlags)[PaperFlags]
    cells = _selected(arguments)
    found: list[Compared] = []

    def lines() -> Iterator[str]:
        for cell in cells:
            found.append(compared(cell))
            yield line(found[-1])

    tables = {HEADING: lines(), ERRORS: error_rows(found), SIGNED: signed_rows(found)}
    tell(tables, arguments.update, "l")


if __name__ == "__main__":
    with told_as_error(ValueError):
        main()
