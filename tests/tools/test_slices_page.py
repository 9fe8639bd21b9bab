"""tools/slices_page.py: the tables of docs/long-sequences.md are those of today's code."""

import pytest

from tools.slices_page import (
    PAGE,
    SCHEDULES,
    SLICES,
    figures,
    schedule_row,
    simulated,
    treatment_row,
)
from tools.slices_page import WITH_VOCABULARY as COSTS

TEXT = PAGE.read_text(encoding="utf-8")


def test_the_page_has_every_schedule_that_is_a_block() -> None:
    table = TEXT[TEXT.index("<!-- slices_page.py: begin -->") :].split("\n\n")[0]
    assert [line.split("`")[1] for line in table.splitlines()[3:]] == list(SCHEDULES)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "hanayo", "zb-v"])
def test_rows_of_schedules_are_current(schedule: str) -> None:
    """Those whose plans are made fastest."""
    assert schedule_row(schedule) in TEXT.splitlines()


@pytest.mark.parametrize(("treatment", "barriers"), [("vocab-1", 2), ("vocab-2", 1)])
def test_rows_of_treatments_are_current_and_as_predicted(treatment: str, barriers: int) -> None:
    row = treatment_row(treatment)
    assert row in TEXT.splitlines()
    held = [float(cell.split(", ")[1]) for cell in row.strip("| ").split(" | ")[1:]]
    assert held == pytest.approx([(n + 8 - 1 + barriers) / n for n in SLICES], abs=5e-4)


def test_figures_are_idle_share_and_microbatches_in_flight() -> None:
    """1F1B, by hand: 7 of 8 + 7 intervals of F + B + S + T are not idle where m = p = 8."""
    found = simulated("1f1b", "none", 8, 8, 1, COSTS)
    assert figures(found) == f"{7 / 15:.1%}, 8"
