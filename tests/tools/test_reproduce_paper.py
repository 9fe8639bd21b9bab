"""The paper's tables in one command: which jobs run, and what is written beside the published."""

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.run.command_line import parse
from tools.predictions.paper_tables import GIBIBYTE, MODELS, TABLES, VOCABULARIES, Cell, read_cells
from tools.reproduce_paper import COLUMNS, MEASURED_FROM, ROOT, flags_of, main, outcome_of

CELLS = [
    cell
    for schedule, file in TABLES.items()
    for cell in read_cells(schedule, ROOT / "docs/reference" / file)
]
CELL = Cell("1f1b", 8, 2048, "Vocab-1", "32k", 50.42, 15.63)


def record(path: Path, mfus: list[float], *, ended: bool = True) -> None:
    lines: list[dict[str, Any]] = [{"event": "start"}]
    for number, mfu in enumerate(mfus, 1):
        ranks = [{"peak_memory": rank * number * GIBIBYTE} for rank in (1, 2)]
        lines.append({"event": "iterations", "iteration": number, "mfu": mfu, "ranks": ranks})
    lines += [{"event": "end"}] * ended
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("small", [False, pytest.param(True, marks=pytest.mark.full)])
def test_every_cell_is_a_job_that_can_be_started(small: bool, tmp_path: Path) -> None:
    """All of one vocabulary; the flags are read as a dry run's, which needs no GPU."""
    for cell in CELLS:
        if cell.vocabulary != "64k":
            continue
        words = flags_of(cell, tmp_path / "records.jsonl", small=small)
        at = words.index("--device")
        ready = [*words[:at], *words[at + 2 :], "--dry-run", *["--bf16"] * small]
        ready.remove("--mock-data")
        run = parse(ready, 1)
        assert run.parallel.pipeline_schedule == cell.schedule
        assert run.train.train_iters > MEASURED_FROM
        if not small:
            sizes = (
                run.model.num_layers,
                run.model.hidden_size,
                run.model.attention.num_attention_heads,
            )
            assert sizes == MODELS[cell.schedule][cell.gpus]
            assert run.model.vocab_size == VOCABULARIES["64k"]
            assert run.train.num_microbatches == 128
            assert not run.model.vocabulary.tie_embeddings


def test_figures_are_those_after_the_warm_up(tmp_path: Path) -> None:
    records = tmp_path / "records.jsonl"
    assert outcome_of(CELL, records) is None
    record(records, [0.1] * (MEASURED_FROM - 1) + [0.4, 0.5, 0.6], ended=False)
    assert outcome_of(CELL, records) is None
    record(records, [0.1] * (MEASURED_FROM - 1) + [0.4, 0.5, 0.6])
    found = outcome_of(CELL, records)
    assert found is not None
    assert found.mfu == pytest.approx(50)
    assert found.peak_gib == pytest.approx(2 * (MEASURED_FROM + 2))
    assert (found.row()["published_mfu"], found.row()["published_peak_gib"]) == (50.42, 15.63)


def test_cells_that_have_ended_are_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        started.append(command)
        return subprocess.CompletedProcess(command, 1, "rank 3 is out of memory in F0")

    started: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", run)
    record(tmp_path / "1f1b-8-2048-Vocab-1-32k.jsonl", [0.5] * 9)
    asked = ["--method", "Vocab-1", "Baseline", "--vocab", "32k", "--seq-length", "2048"]
    main(["--out", str(tmp_path), *asked, "--launch", "srun -n 8 python"])
    assert [command[:4] for command in started] == [["srun", "-n", "8", "python"]]
    assert "none" in started[0]
    with (tmp_path / "report.csv").open() as file:
        rows = {row["method"]: row for row in csv.DictReader(file)}
    assert list(rows["Baseline"]) == list(COLUMNS)
    assert rows["Baseline"]["mfu"] == ""
    assert rows["Baseline"]["note"].startswith("out of memory")
    assert (float(rows["Vocab-1"]["mfu"]), rows["Vocab-1"]["published_mfu"]) == (50, "50.42")
    assert "| 50.00 | 50.42 |" in (tmp_path / "report.md").read_text()
    assert (tmp_path / "report.png").stat().st_size > 0
    assert "2 of 2" in capsys.readouterr().out


def test_a_selection_without_cells_is_refused() -> None:
    with pytest.raises(ValueError, match="--gpus 7: the tables have no such setup"):
        main(["--out", "unused", "--gpus", "7"])


@pytest.mark.full
def test_the_small_form_runs_to_its_end(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable, str(ROOT / "tools/reproduce_paper.py"), "--out", str(tmp_path),
            "--small", "--schedule", "1f1b", "--seq-length", "2048", "--vocab", "32k",
            "--method", "Baseline", "Vocab-2",
        ],
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    with (tmp_path / "report.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == ["Baseline", "Vocab-2"]
    assert all(float(row["mfu"]) > 0 and float(row["peak_gib"]) > 0 for row in rows)
