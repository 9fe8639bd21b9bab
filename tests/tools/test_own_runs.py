"""docs/reference/own_runs.csv: measured by this project, predicted anew, and said in the docs."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from megatron.simulator.costs.accuracy import OWN
from tools.gpu_sections.predicted import MODELS, flags_of
from tools.predictions.own_runs import (
    COLUMNS,
    HEADING,
    OwnRun,
    errors_of,
    main,
    read_own,
    write_own,
)

TABLE = Path("docs/reference/own_runs.csv")
PAGE = Path("docs/predictions.md")
RUNS = read_own(TABLE)


def test_the_table_of_the_docs_is_a_new_prediction() -> None:
    """If this fails, ``tools/predict_published.py --update`` has the figures that hold."""
    page = PAGE.read_text(encoding="utf-8").splitlines()
    start = page.index(HEADING) + 2
    assert page[start : start + len(RUNS)] == [run.line for run in RUNS]


def test_what_a_dry_run_says_of_them_are_their_errors() -> None:
    for kind in OWN:
        assert OWN[kind] == errors_of([run for run in RUNS if run.kind == kind])
    assert {run.kind for run in RUNS} == set(OWN)


def report(folder: Path, rows: Mapping[str, object]) -> Path:
    file = folder / "report.json"
    machine = {"device": "1 x NVIDIA H200, 139 GiB", "PyTorch": "2", "triton": "3", "commit": "c"}
    document = {"machine": {"values": machine}, "predicted": {"values": rows}}
    file.write_text(json.dumps(document))
    return file


def test_rows_come_from_a_report(tmp_path: Path) -> None:
    first, second = list(MODELS)[:2]
    measured = {"iteration": 100.0, "step": 4.0, "memory": 9.5}
    rows = {first: measured, second: {**measured, "iteration": "out of memory"}}
    table = tmp_path / "own.csv"
    main([str(report(tmp_path, rows)), str(table), "--date", "2026-01-02"])
    assert read_own(table) == [OwnRun(first, "H200", 100.0, 4.0, flags_of(first), 9.5)]
    header, line = table.read_text().splitlines()
    assert header == ",".join(COLUMNS)
    assert "2026-01-02,2,3,c," in line


@pytest.mark.parametrize("text", ["", "model,gpu\nGPT,H200\n", "model,gpu\nGPT,H1\n"])
def test_another_table_is_refused(text: str, tmp_path: Path) -> None:
    table = tmp_path / "own.csv"
    table.write_text(text)
    if text:
        with pytest.raises(ValueError, match="is no table of own runs"):
            read_own(table)
    with pytest.raises(ValueError, match="is no report of a GPU"):
        write_own(table, tmp_path / "other.csv", "today")
