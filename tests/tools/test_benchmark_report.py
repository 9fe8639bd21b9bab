"""The benchmark's report: ratios from known runs."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from benchmark_case import Case
from benchmark_report import summarise, write_report


def case(treatment: str) -> Case:
    return Case(64000, treatment, 2, 4, 64, 2, 4, 32, "bfloat16", "cpu")


def run(schedule: float, **changes: Any) -> dict[str, Any]:
    values = {
        "schedule_s": schedule,
        "update_s": 1.0,
        "ideal_s": 0.9 * schedule,
        "simulated_s": 1.1 * schedule,
        "pass_ms": {"F": [1.0, 2.0], "B": [3.0, 4.0]},
        "flops": 8e12,
        "product_tflops": 2.0,
        "peak_tflops": 4.0,
        "memory_bytes": [1e9, 2e9],
        "in_flight": [2, 1],
        "loss": 1.0,
    }
    return values | changes


def test_rows_are_medians_and_ratios_of_whole_iterations() -> None:
    cases = [case("none"), case("vocab-2")]
    runs = {cases[0].name: [run(7.0), run(70.0), run(6.0)], cases[1].name: [run(3.0)]}
    none, vocab = summarise(cases, runs)
    assert none.iteration_ms == pytest.approx(8000)
    assert none.to_none is None
    assert vocab.to_none == pytest.approx(2)
    assert vocab.of_ideal == pytest.approx(0.9)
    assert vocab.simulated == pytest.approx(1.1)
    assert vocab.tokens_per_s == pytest.approx(4 * 32 / 4)
    # The floor: 8 TFLOP on two ranks of 2 TFLOP/s take 2 s, of the peak's 4 TFLOP/s 1 s.
    assert vocab.to_floor == pytest.approx(2)
    assert vocab.to_peak_floor == pytest.approx(4)
    assert vocab.mfu == pytest.approx(1 / 4)
    assert vocab.memory_gb == [1.0, 2.0]


def test_report_files_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = summarise([case("none")], {case("none").name: [run(7.0)]})
    write_report(rows, case("none"), "python tools/benchmark.py", 1, tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert capsys.readouterr().out.strip() in text
    assert "python tools/benchmark.py" in text
    document = json.loads((tmp_path / "report.json").read_text())
    assert document["rows"][0]["iteration_ms"] == pytest.approx(8000)
    assert (tmp_path / "report.png").stat().st_size > 1000
