#!/usr/bin/env python3
"""Predict iterations that others published, and compare.

python tools/predict_published.py docs/reference

Each row of the first table is a run of Megatron-LM. Constants of A100s were fitted to nine rows
(``tools/predictions/calibrate.py``); every third row was kept out. All rows were seen while the
model was made. Two tables follow: the passes that 8 A100s were measured at, and this project's own
iterations on one GPU. ``--update`` writes all tables into the page that has them,
docs/predictions.md.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.flags.command import read
from megatron.flags.declare import flag, positional
from megatron.flags.ranges import COUNT
from megatron.flags.readable import told_as_error
from megatron.simulator.costs.accuracy import RunClass
from tools.pages.tables import Errors, row, tell, update_flag
from tools.predictions.own_runs import HEADING as OWN
from tools.predictions.own_runs import read_own
from tools.predictions.paper_tables import MEASURED
from tools.predictions.pass_times import HEADING as PASSES
from tools.predictions.pass_times import pass_rows
from tools.predictions.published import Prediction, predict
from tools.predictions.published_runs import (
    MACHINE,
    PublishedRun,
    is_fitted,
    is_kept_out,
    read_published,
)

HEADING: Final = (
    "| row | run | GPUs | t, p, d | micro batch, chunks | measured s | predicted s | error | |"
)
CLASSES: Final = "| class | rows | mean | largest |"
NEITHER: Final = "neither fitted nor kept out"
PUBLISHED: Final = "published_runs.csv"
OWN_RUNS: Final = "own_runs.csv"


def line(index: int, found: Sequence[Prediction]) -> str:
    """Return the line of a run.

    Args:
        index: index of the row, from 0 on.
        found: predictions of the run, the fastest first.
    """
    best, run = found[0], found[0].run
    errors = [each.error for each in found]
    tried = f" ({min(errors):+.1%} to {max(errors):+.1%})" if len(found) > 1 else ""
    said = [
        str(value) if given else f"{value}?"
        for value, given in (
            (best.choice.micro_batch, run.micro_batch),
            (best.choice.chunks, run.chunks or run.pipeline == 1),
        )
    ]
    words = [
        str(run.number),
        f"{run.model}, {run.gpu.name}{f', {run.recompute}' if run.recompute else ''}",
        f"{run.gpus:,}",
        f"{run.tensor}, {run.pipeline}, {run.replicas}",
        ", ".join(said),
        f"{run.seconds:.2f}",
        f"{best.seconds:.2f}",
        f"{best.error:+.1%}{tried}",
        use_of(index, run),
    ]
    return row(*words).replace("%", " %")


def use_of(index: int, run: PublishedRun) -> str:
    """Return what the calibration did with the row of that index; empty: nothing."""
    return "fitted" if is_fitted(index, run) else "kept out" if is_kept_out(index) else ""


def class_of(run: PublishedRun) -> RunClass:
    """Return the class of runs to which a run belongs."""
    return RunClass(run.gpu.name, shared=run.tensor > 1, across=run.gpus > MACHINE)


def class_rows(predictions: Sequence[Prediction]) -> Iterator[str]:
    """Yield the errors by use of the rows, and for every class of rows that were not fitted to."""
    groups: dict[str, list[float]] = {"fitted": [], "kept out": [], NEITHER: []}
    for index, each in enumerate(predictions):
        use = use_of(index, each.run)
        names = [use or NEITHER]
        if use != "fitted":
            names.append(f"{class_of(each.run)}, not fitted")
        for name in names:
            groups.setdefault(name, []).append(each.error)
    for name, errors in groups.items():
        found = Errors(errors)
        yield row(name, len(errors), found.mean, found.largest)


@dataclass(frozen=True)
class PublishedFlags:
    """What is predicted."""

    reference: Path = positional(
        f"Folder with {PUBLISHED}, {MEASURED} and {OWN_RUNS}.", "REFERENCE"
    )
    rows: tuple[int, ...] = flag((), "Only these rows, by their id.", COUNT, unset="all")
    update: Path | None = update_flag("--rows")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command.

    Raises:
        ValueError: for files that are not such tables.
    """
    arguments = read(argv, __doc__, PublishedFlags)[PublishedFlags]
    best: list[Prediction] = []

    def lines() -> Iterator[str]:
        for index, run in enumerate(read_published(arguments.reference / PUBLISHED)):
            if not arguments.rows or run.number in arguments.rows:
                found = predict(run)
                best.append(found[0])
                yield line(index, found)

    tables: dict[str, Iterable[str]] = {HEADING: lines()}
    if not arguments.rows:
        own = (run.line for run in read_own(arguments.reference / OWN_RUNS))
        passes = pass_rows(arguments.reference / MEASURED)
        tables |= {CLASSES: class_rows(best), PASSES: passes, OWN: own}
    tell(tables, arguments.update)


if __name__ == "__main__":
    with told_as_error(ValueError):
        main()
