"""The paper's tables are predicted as well as is said, cell by cell."""

from dataclasses import astuple
from pathlib import Path

import pytest

from megatron.simulator.costs.accuracy import CHECKED, Errors, together
from tools.predict_paper import line
from tools.predictions.paper_tables import (
    MEASURED,
    TABLES,
    errors_of,
    measured_devices,
    read_cells,
)

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "predictions.md").read_text().splitlines()
QUICK = ("1f1b", 8)
TITLES = {"1f1b": "1F1B", "v-half": "V-Half"}


@pytest.mark.parametrize(
    ("schedule", "gpus"),
    [
        pytest.param(*setup, marks=() if setup == QUICK else pytest.mark.full)
        for setup in ((schedule, gpus) for schedule in CHECKED for gpus in CHECKED[schedule])
    ],
)
def test_no_cell_is_predicted_worse_than_is_said(schedule: str, gpus: int) -> None:
    """Nor better: what changes predictions for the better changes what is said, too.

    If this fails, ``tools/predict_paper.py --update`` has the figures that hold.
    """
    cells = [
        c for c in read_cells(schedule, DOCS / "reference" / TABLES[schedule]) if c.gpus == gpus
    ]
    devices = measured_devices(DOCS / "reference" / MEASURED)
    jobs = [cell.paper_job(devices) for cell in cells]
    found = errors_of(cells, jobs)
    assert found is not None
    assert tuple(round(figure, 2) for figure in astuple(found)) == astuple(CHECKED[schedule][gpus])
    for cell, job in zip(cells, jobs, strict=True):
        assert line(cell, job, None) in PAGE


def test_every_run_of_the_tables_is_checked() -> None:
    for schedule, file in TABLES.items():
        cells = read_cells(schedule, DOCS / "reference" / file)
        runs = dict.fromkeys(dict.fromkeys(cell.gpus for cell in cells), 0)
        for cell in cells:
            runs[cell.gpus] += cell.mfu is not None
        assert {gpus: errors.runs for gpus, errors in CHECKED[schedule].items()} == runs


def test_the_page_has_the_same_figures() -> None:
    tables = {TITLES[schedule]: together(CHECKED[schedule].values()) for schedule in TABLES}
    for title, errors in {**tables, "both": together(tables.values())}.items():
        assert _row(title) == _in_cells(errors)
    for schedule in TABLES:
        said = [cell.strip() for cell in _row(f"{TITLES[schedule]} by GPUs") if cell.strip()]
        errors_by_gpus = CHECKED[schedule].values()
        assert said == [f"{each.mfu:.2f} ({each.most_mfu:.2f})" for each in errors_by_gpus]


def _row(title: str) -> list[str]:
    """The cells of the page's only row of five columns that begins with ``title``."""
    [row] = [
        row
        for row in PAGE
        if row.startswith((f"| {title} |", f"| {title} (")) and row.count("|") == 6
    ]
    return row.split("|")[2:-1]


def _in_cells(errors: Errors) -> list[str]:
    return [
        f" {errors.mfu:.2f} ",
        f" {errors.most_mfu:.1f} ",
        f" {errors.memory:.1f} % ",
        f" {errors.most_memory:.0f} % ",
    ]


def test_errors_together_are_those_over_all_runs() -> None:
    found = together([Errors(1, 2.0, 2.0, 8.0, 8.0), Errors(3, 4.0, 5.0, 4.0, 9.0)])
    assert found == Errors(4, 3.5, 5.0, 5.0, 9.0)
