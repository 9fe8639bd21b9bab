"""The benchmark's report: ratios from known runs, and what can be run at all."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.planning.run_plan import make_run_plan
from megatron.schedules.held import in_flight
from megatron.simulator.metrics import DEFINITIONS, definitions
from tools import benchmark
from tools.benchmarking.case import BenchmarkCase
from tools.benchmarking.report import Report, best_of_each, detail_table, table, write_report
from tools.benchmarking.summary import Rates, Row, rates_of, summarise


def case(schedule: str, treatment: str) -> BenchmarkCase:
    return BenchmarkCase(64000, schedule, treatment, 2, 4, 64, 4, 4, 32, "bfloat16", "cpu")


BASE = case("1f1b", "none")


def reference_run(schedule: float, **changes: Any) -> dict[str, Any]:
    values = {
        "schedule_s": schedule,
        "flops": 8e12,
        "product_tflops": 2.0,
        "peak_tflops": 4.0,
        "memory_bytes": [1e9, 2e9],
        "loss": 10.0,
    }
    return values | changes


def run(schedule: float, **changes: Any) -> dict[str, Any]:
    values = {
        "update_s": 1.0,
        "ideal_s": 0.9 * schedule,
        "simulated_s": 1.1 * schedule,
        "cpu_s": 0.5 * schedule,
        "pass_ms": {"F": [1.0, 2.0], "B": [3.0, 4.0]},
        "in_flight": [2, 1],
        "promised_in_flight": [2.0, 1.0],
        "promised_bytes": [0.5e9, 0.75e9],
    }
    return reference_run(schedule) | values | changes


def report(rows: list[Row]) -> Report:
    return Report(rows, [Rates(2.0, 4.0)], BASE, "python tools/benchmark.py", 1, ["auto: zb-v."])


def test_rows_are_medians_and_ratios_of_forward_and_backward() -> None:
    cases = [case("single", "none"), BASE, case("zb-v", "vocab-2")]
    runs = {
        cases[0].name: [reference_run(6.0)],
        cases[1].name: [run(8.0), run(70.0), run(6.0)],
        cases[2].name: [run(4.0)],
    }
    single, none, vocab = summarise(cases, runs)
    assert none.schedule_ms == pytest.approx(8000)
    assert none.update_ms == pytest.approx(1000)
    assert none.cpu_s == pytest.approx(4)
    assert single.cpu_s is None
    assert none.to_base == pytest.approx(1)
    assert vocab.to_base == pytest.approx(2)
    assert vocab.idle == pytest.approx(0.1)
    assert vocab.simulated == pytest.approx(1.1)
    assert vocab.tokens_per_s == pytest.approx(4 * 32 / 4)
    # The floor: 8 TFLOP on two ranks of 2 TFLOP/s take 2 s, of the peak's 4 TFLOP/s 1 s.
    assert vocab.to_floor == pytest.approx(2)
    assert vocab.mfu == pytest.approx(1 / 4)
    assert vocab.memory_gb == [1.0, 2.0]
    assert vocab.promised_gb == [0.5, 0.75]
    assert single.to_base == pytest.approx(8 / 6)
    assert single.update_ms is None


def test_rates_are_those_of_a_round() -> None:
    cases = [BASE, case("zb-v", "vocab-2"), case("1f1b", "vocab-2")]
    runs = {
        cases[0].name: [run(8.0), run(8.0)],
        cases[1].name: [run(4.0, product_tflops=0.5), run(6.0, product_tflops=3.0)],
        cases[2].name: [run(4.0, peak_tflops=9.0), run(4.0, product_tflops=4.0)],
    }
    assert rates_of(runs) == [Rates(1.5, 4.0), Rates(3.0, 4.0)]
    rows = summarise(cases, runs)
    assert [row.to_floor for row in rows] == pytest.approx([4.5, (1.5 + 4.5) / 2, (1.5 + 3) / 2])


def test_without_the_base_nothing_is_compared_with_it() -> None:
    (row,) = summarise([case("zb-v", "none")], {case("zb-v", "none").name: [run(1.0)]})
    assert row.to_base is None


def test_report_files_say_the_same(tmp_path: Path) -> None:
    rows = summarise([BASE], {BASE.name: [run(7.0)]})
    write_report(report(rows), tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert table(rows) in text
    assert detail_table(rows) in text
    for name in DEFINITIONS.keys() - {"bubble"}:
        assert text.count(definitions(name)) == 1
    assert "python tools/benchmark.py" in text
    assert "auto: zb-v." in text
    document = json.loads((tmp_path / "report.json").read_text())
    assert document["rows"][0]["schedule_ms"] == pytest.approx(7000)
    assert (tmp_path / "report.png").stat().st_size > 1000


def test_report_says_how_far_first_losses_are_apart(tmp_path: Path) -> None:
    cases = [case("single", "none"), BASE]
    runs = {cases[0].name: [reference_run(1.0, loss=10.5)], cases[1].name: [run(1.0)]}
    write_report(report(summarise(cases, runs)), tmp_path)
    assert "first loss 10.0000, in all cases to 5.0e-02" in (tmp_path / "report.md").read_text()


def test_plot_takes_the_fastest_schedule_of_every_treatment() -> None:
    cases = [case("single", "none"), BASE, case("zb-v", "none"), case("1f1b", "vocab-2")]
    cases += [replace(c, vocab_size=32000) for c in cases]
    seconds = [9.0, 5.0, 4.0, 3.0, 8.0, 2.0, 3.0, 1.0]
    runs = {
        c.name: [reference_run(s) if c.is_reference else run(s)]
        for c, s in zip(cases, seconds, strict=True)
    }
    lines = best_of_each(summarise(cases, runs))
    points = {label: [(r.vocab_size, r.schedule) for r in line] for label, line in lines.items()}
    assert points == {
        "single": [(32000, "single"), (64000, "single")],
        "none": [(32000, "1f1b"), (64000, "zb-v")],
        "vocab-2": [(32000, "1f1b"), (64000, "1f1b")],
    }


def test_cases_without_a_plan_are_left_out_with_the_reason() -> None:
    wanted = [BASE, replace(case("zb-v", "none"), layers=3), case("single", "none")]
    chosen, remarks = benchmark.choose_cases(wanted)
    assert chosen == [BASE, case("single", "none")]
    assert len(remarks) == 1
    assert "zb-v" in remarks[0]
    assert "not divisible" in remarks[0]


def test_zb_auto_needs_a_memory_limit_and_keeps_to_it() -> None:
    without = case("zb-auto", "vocab-2")
    assert benchmark.choose_cases([without])[0] == []
    limited = replace(without, memory_limit=2.0)
    assert benchmark.choose_cases([limited])[0] == [limited]
    assert max(in_flight(make_run_plan(limited.run_config()).plan)) <= 2


def test_slices_are_cases_of_their_own_beside_whole_microbatches() -> None:
    words = "--num-seq-splits 1 4 --pipeline-schedule 1f1b --vocab-parallel none --vocab-size 64000"
    options = benchmark.parse_arguments([*words.split(), "--references", "single"])
    wanted = list(benchmark.wanted_cases(options))
    assert [(c.schedule, c.slices, c.layout) for c in wanted] == [
        ("single", 1, ""),
        ("1f1b", 1, "p=2"),
        ("1f1b", 4, "p=2,n=4"),
    ]
    assert make_run_plan(wanted[2].run_config()).plan.slices == 4
    _, whole, cut = summarise(wanted, {c.name: [run(8.0 / c.slices)] for c in wanted})
    assert (whole.to_base, cut.to_base) == (1, 4)


def test_auto_becomes_the_schedule_that_it_chooses_and_is_run_once() -> None:
    named = [case(name, "vocab-2") for name in ("1f1b", "zb-v", "v-half", "v-min")]
    alone, (remark,) = benchmark.choose_cases([case("auto", "vocab-2")])
    assert alone[0].schedule != "auto"
    assert f": {alone[0].schedule}." in remark
    both, _ = benchmark.choose_cases([*named, alone[0], case("auto", "vocab-2")])
    assert sum(c == alone[0] for c in both) == 1
