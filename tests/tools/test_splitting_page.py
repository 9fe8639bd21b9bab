"""tools/splitting_page.py: the tables are new predictions, and losses are what they say."""

import json
from itertools import cycle

import pytest
from harness.marks import full

from tools.pages.tables import PAGE, replaced
from tools.predictions.kept import restored
from tools.predictions.splitting import (
    JOBS,
    VOCABULARIES,
    Cell,
    Job,
    Losses,
    Row,
    cell,
    row_of,
)
from tools.splitting_page import TOOL, gain, loss_rows, summary

SMALL = Job("H100", "8B", 2, 4, ("1f1b",))


def made(seconds: float) -> Cell:
    return Cell("1f1b", False, seconds, 40.0, Losses(0.1, 0.02, 0.0, 0.03, 0.04))


ROW: Row = {"none": made(2.2), "redis": made(2.1), "vocab-1": None, "vocab-2": made(2.0)}


def test_the_gain_compares_the_faster_of_each_kind() -> None:
    assert gain(ROW, SMALL) == "+5.0%"
    assert gain({**ROW, "vocab-2": None}, SMALL) == "-"


def test_a_gain_below_the_error_of_predictions_is_a_tie() -> None:
    near: Row = {**ROW, "vocab-2": made(2.04)}
    assert gain(near, SMALL) == "+2.9%, a tie"
    assert gain({**ROW, "vocab-2": made(2.02)}, SMALL) == "+4.0%"
    several = SMALL._replace(pipeline=8)  # predictions for several machines err more
    assert gain({**ROW, "vocab-2": made(2.02)}, several) == "+4.0%, a tie"
    assert gain(ROW, several) == "+5.0%"


def test_a_row_names_the_job_and_shows_the_fastest_in_bold() -> None:
    row = summary(SMALL, "32k", ROW)
    assert row == (
        "| 8 H100 | 8B | 2, 4 | 32k | 2.20 (1f1b) | 2.10 (1f1b) | - | **2.00 (1f1b)** | +5.0% |"
    )
    assert len(list(loss_rows(SMALL, "32k", ROW))) == 3


def test_only_the_tables_of_the_page_are_replaced() -> None:
    page = PAGE.read_text(encoding="utf-8")
    changed = replaced(page, ["tables"], TOOL)
    assert "\ntables\n" in changed
    assert replaced(changed, ["other"], TOOL) == replaced(page, ["other"], TOOL)


def test_a_row_that_was_kept_is_the_same_row() -> None:
    assert restored(Row, json.loads(json.dumps(ROW))) == ROW


def test_a_plan_within_a_machine_loses_nothing_to_a_network() -> None:
    found = cell(SMALL, "vocab-2", 32_000)
    assert found is not None
    lost = found.losses
    assert lost.network == pytest.approx(0.0)
    assert 0 < lost.idle < 0.5
    assert 0 < lost.vocabulary < 0.05
    assert 0 < lost.tensor < 0.2
    assert 0 < lost.products < 0.2


_ROWS = [
    full((job, name), id=f"{job.words} {name}".replace(" | ", " "))
    for job, name in zip(JOBS, cycle(VOCABULARIES), strict=False)
]
"""A row of every job: of each model, and of each GPU, with every vocabulary."""


@pytest.mark.parametrize("asked_for", _ROWS)
def test_a_row_of_the_page_is_a_new_prediction(asked_for: tuple[Job, str]) -> None:
    """Else: python tools/splitting_page.py --update."""
    page = PAGE.read_text(encoding="utf-8").splitlines()
    found = row_of(asked_for)
    assert summary(*asked_for, found) in page
    assert set(loss_rows(*asked_for, found)) <= set(page)


def test_one_row_of_the_page_is_a_new_prediction() -> None:
    """The quickest. Else: python tools/splitting_page.py --update."""
    job = next(own for own in JOBS if own.schedules == ("1f1b",) and own.pipeline == 8)
    found: Row = {"none": cell(job, "none", VOCABULARIES["32k"])}
    [row, *_] = loss_rows(job, "32k", found)
    assert row in PAGE.read_text(encoding="utf-8").splitlines()
