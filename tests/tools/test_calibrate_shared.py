"""tools/predictions/calibrate_shared.py: fits find constants, and what is left out is left out."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from megatron.simulator.costs.launch_time import Rates
from tools.predictions.calibrate_shared import (
    FITTED,
    LEFT,
    STAGES,
    VALIDATED,
    Scaled,
    Stage,
    errors,
    family_of,
    fitted,
    left_out,
    rates_of,
    read_scaled,
    score,
    tables,
)
from tools.predictions.shared_runs import read_shared

REFERENCE = Path("docs/reference")
PAGE = Path("docs/predictions.md")
RUNS, _ = read_shared(REFERENCE / "published_2026.csv")
QUICK = {run.number: run for run in RUNS}


@dataclass(frozen=True)
class Made(Scaled):
    """A row that takes its products' time and nothing else; its true share is ``share``."""

    share: float = 0.6

    def error(self, rates: Rates) -> float:
        return self.share / rates.product_share - 1


def made(number: int, share: float) -> Made:
    return Made(QUICK[number], 1.0, share=share)


ROWS = [made(1280, 0.60), made(1290, 0.66), made(1268, 0.66), made(1269, 0.66)]
"""Llama 8B, GPT-3 175B, and two of Llama 70B on other numbers of GPUs."""
GRID = {"product_share": (0.58, 0.60, 0.62, 0.64, 0.66)}
BEGIN = {"product_share": 0.58}


def test_a_fit_weighs_families_alike() -> None:
    """Squares of the errors of three families: by hand for the values around the best."""
    best = fitted(ROWS, BEGIN, GRID)["product_share"]
    by_hand = {
        share: (((0.60 / share - 1) ** 2 + 2 * (0.66 / share - 1) ** 2) / 3) ** 0.5
        for share in GRID["product_share"]
    }
    assert best == min(by_hand, key=by_hand.__getitem__)
    assert score(ROWS, {"product_share": best}) == pytest.approx(by_hand[best])


def test_what_is_left_out_has_no_part_in_its_constants() -> None:
    found = {left.name: left.errors for left in left_out(ROWS, BEGIN, GRID, family_of)}
    assert set(found) == {"Llama 8B", "GPT-3 175B", "Llama 70B"}
    assert list(found["Llama 8B"]) == pytest.approx([0.60 / 0.66 - 1])
    assert len(found["Llama 70B"]) == 2
    alone = list(left_out(ROWS[:1], BEGIN, GRID, family_of))
    assert len(alone) == 1
    assert list(alone[0].errors) == pytest.approx([0.60 / 0.58 - 1])


def test_a_faster_product_shortens_a_real_row() -> None:
    """Its passes are mostly products: 10 % more speed saves 5 to 10 % of the time."""
    row = Scaled(QUICK[1280], 16.0)
    now = row.run.gpu.rates
    assert row.error(now) == pytest.approx(16.0 / 12.78 - 1)
    faster = rates_of(row.run, {"product_share": 1.1 * now.product_share})
    saved = 1 - (1 + row.error(faster)) / (1 + row.error(now))
    assert 0.05 < saved < 0.1
    assert errors([row], {"gap": now.gap}) == [row.error(now)]


def test_tables_have_a_line_for_every_stage_and_family() -> None:
    stage = Stage("H100, bf16, dense", lambda run: True, GRID)
    later = replace(stage, name="again", after="H100, bf16, dense")
    told = tables(ROWS, [stage, later])
    assert [len(told[heading]) for heading in (FITTED, VALIDATED, LEFT)] == [2, 2, 6]
    assert told[FITTED][0].startswith("| H100, bf16, dense | product_share 0.64 | 4 | 3 |")
    for heading, lines in told.items():
        assert all(line.count("|") == heading.count("|") for line in lines)


def test_every_row_is_fitted_in_one_stage_at_most() -> None:
    for run in RUNS:
        assert sum(stage.takes(run) for stage in STAGES) == 1


def test_the_docs_have_a_line_for_every_stage() -> None:
    page = PAGE.read_text(encoding="utf-8").splitlines()
    start = page.index(FITTED) + 2
    for stage, line in zip(STAGES, page[start : start + len(STAGES)], strict=True):
        assert line.startswith(f"| {stage.name} | ")
    assert len(read_scaled(REFERENCE)) == len(RUNS)
