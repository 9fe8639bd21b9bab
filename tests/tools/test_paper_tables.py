"""The paper's tables are predicted as well as is said, cell by cell."""

from pathlib import Path
from statistics import mean

import pytest

from megatron.simulator.costs.accuracy import PAPER, PAPER_NOT_FITTED, RunClass
from tools.predict_paper import ERRORS, HEADING, Compared, compared, line
from tools.predictions.paper_tables import TABLES, Cell, read_cells

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "predictions.md").read_text().splitlines()
CELLS = [
    cell
    for schedule, file in TABLES.items()
    for cell in read_cells(schedule, DOCS / "reference" / file)
]
SETUPS = [("1f1b", 8), ("1f1b", 16), ("1f1b", 32), ("v-half", 16), ("v-half", 24), ("v-half", 32)]
QUICK = ("1f1b", 8)
APART = "A100, t = 1, one machine, not fitted"


def cells_of(schedule: str, gpus: int) -> list[Cell]:
    return [cell for cell in CELLS if (cell.schedule, cell.gpus) == (schedule, gpus)]


@pytest.mark.parametrize(
    ("schedule", "gpus"),
    [pytest.param(*each, marks=() if each == QUICK else pytest.mark.full) for each in SETUPS],
)
def test_a_cell_of_the_docs_is_a_new_prediction(schedule: str, gpus: int) -> None:
    """If this fails, ``tools/predict_paper.py --update`` has the figures that hold."""
    for cell in cells_of(schedule, gpus):
        assert line(compared(cell)) in PAGE


def test_cells_of_eight_gpus_are_as_near_as_with_shares_of_their_own() -> None:
    """With rates fitted to each treatment the mean was 2.72 points."""
    errors = [abs(own.points) for own in said(8)]
    assert len(errors) == 40
    assert mean(errors) <= 2.72


def test_peaks_are_within_two_percent_but_for_split_vocabularies_in_v_half() -> None:
    found = said()
    assert len(found) == sum(errors.runs for errors in PAPER.values())
    assert mean(abs(own.memory) for own in found) < 1
    for own in found:
        open_cause = (own.cell.schedule, own.cell.method) == ("v-half", "Vocab-1")
        assert abs(own.memory) < (4 if open_cause else 2.1)


def test_what_a_dry_run_may_say_of_the_paper_is_what_the_docs_say() -> None:
    one_machine = RunClass("A100", shared=False, across=False)
    named = {str(kind): own for kind, own in PAPER.items()}
    for name, own in (named | {APART: PAPER_NOT_FITTED[one_machine]}).items():
        cells = table(ERRORS)[name]
        assert int(cells[0]) == own.runs
        assert [float(cell.removesuffix(" %")) for cell in cells[3:5]] == [own.mean, own.most]
    assert {**PAPER, one_machine: PAPER_NOT_FITTED[one_machine]} == PAPER_NOT_FITTED


def test_runs_like_those_whose_passes_were_fitted_are_no_check() -> None:
    """The 20 others of one machine, by the page's own cells, whose MFU has one decimal."""
    times = [abs(own.time) for own in said(8) if not own.is_fitted]
    assert len(times) == 20
    assert {own.cell.seq_length for own in said(8) if own.is_fitted} == {2048}
    assert mean(times) == pytest.approx(float(table(ERRORS)[APART][3].split()[0]), abs=0.15)
    assert max(times) == pytest.approx(float(table(ERRORS)[APART][4].split()[0]), abs=0.3)


def said(gpus: int | None = None) -> list[Compared]:
    """The predictions of the page for cells that ran."""
    start = PAGE.index(HEADING) + 2
    found = []
    for cell, row in zip(CELLS, PAGE[start:], strict=False):
        words = [word.strip() for word in row.strip("|").split("|")]
        if cell.mfu is not None and gpus in (None, cell.gpus):
            found.append(Compared(cell, float(words[6]), float(words[9])))
    return found


def table(heading: str) -> dict[str, list[str]]:
    start = PAGE.index(heading) + 2
    rows = PAGE[start : PAGE.index("", start)]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {name: own for name, *own in cells}
