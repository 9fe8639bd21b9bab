"""tools/predict_paper.py: cells read, predicted and compared; errors named with their place."""

from pathlib import Path

import pytest

import tools.predict_paper as predict_paper
import tools.predictions.paper_tables as paper_tables
from tools.synthetic_runs import VOCABULARIES, as_csv, run

FIGURES = [
    f"{figure}_{size}" for figure in ("mfu", "peak_gb") for size in paper_tables.VOCABULARIES
]
HEADER = ",".join(["gpus", "seq_length", "method", *FIGURES])


@pytest.fixture
def reference(tmp_path: Path) -> Path:
    methods = ("baseline", "vocab-1", "vocab-2", "interlaced")
    runs = [run(method, size) for method in methods for size in VOCABULARIES]
    (tmp_path / paper_tables.MEASURED).write_text(as_csv(runs))
    figures = "40,40,40,-,20,20,20,-"
    rows = [f"8,2048,{method},{figures}" for method in ("Baseline", "Vocab-2")]
    for name, lines in (("1f1b", rows), ("v-half", [])):
        text = "\n".join([HEADER, *lines]) + "\n"
        (tmp_path / paper_tables.TABLES[name]).write_text(text)
    return tmp_path


def test_cells_are_predicted_and_compared(
    reference: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    predict_paper.main([str(reference)])
    devices, rows, errors = capsys.readouterr().out.strip().split("\n\n")
    heading, _, *lines = rows.splitlines()
    setup, table, both = errors.splitlines()
    assert "* vocab-2: products attain output 0.481, forward 0.385, backward 0.321" in devices
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert len(cells) == 8
    assert all(len(cell) == len(heading.strip("|").split("|")) for cell in cells)
    fitted = [cell for cell in cells if cell[5] != "-"]
    assert len(fitted) == 6
    for _, gpus, sequence, *_, mfu, predicted, error, _, _, _ in fitted:
        assert (gpus, sequence, mfu) == ("8", "2048", "40.0")
        assert float(error) == pytest.approx(float(predicted) - 40, abs=0.051)
    mean = sum(abs(float(cell[7])) for cell in fitted) / 6
    assert float(table.split("error ")[1].split()[0]) == pytest.approx(mean, abs=0.06)
    assert table.removeprefix("1f1b") == both.removeprefix("both tables")
    assert setup.removeprefix("1f1b, 8 GPUs") == table.removeprefix("1f1b")
    assert table.startswith("1f1b: 6 runs")


def test_lines_are_brought_up_to_date_in_the_page_that_has_them(
    reference: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(paper_tables, "MICROBATCHES", 4)
    page = tmp_path / "page.md"
    predict_paper.main([str(reference)])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| 1f1b")]
    old = [line.replace(" 40.0 |", " 39.0 |") for line in lines]
    page.write_text("\n".join(["Before.", *old, "After."]) + "\n")
    predict_paper.main([str(reference), "--update", str(page)])
    assert page.read_text().splitlines() == ["Before.", *lines, "After."]
    page.write_text("\n".join(old[1:]))
    with pytest.raises(ValueError, match=r"page.md has 0 lines that begin with '\| 1f1b \| 8"):
        predict_paper.main([str(reference), "--update", str(page)])


def test_auto_is_at_least_as_fast_and_fits(
    reference: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = paper_tables.measured_devices(reference / paper_tables.MEASURED)
    cell = paper_tables.read_cells("1f1b", reference / paper_tables.TABLES["1f1b"])[0]
    few = {"vocab-2": devices["vocab-2"]}
    monkeypatch.setattr(paper_tables, "MICROBATCHES", 4)
    monkeypatch.setattr(predict_paper, "SCHEDULES", ["1f1b", "zb-h1", "v-half"])
    found = predict_paper.fastest(cell, few, limit_gib=30)
    paper = cell.job("1f1b", "vocab-2", devices, shortened=True)
    assert found is not None
    assert found.time <= paper.time
    assert found.peak <= 30 * paper_tables.GIBIBYTE
    assert predict_paper.fastest(cell, few, limit_gib=1) is None


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("9,2048,Baseline,1,1,1,1,1,1,1,1", "line 2: column gpus: '9' is none of"),
        ("8,2048,Tensor,1,1,1,1,1,1,1,1", "line 2: column method: 'Tensor' is none of"),
        ("8,2048,Redis,1,1,one,1,1,1,1,1", "line 2: column mfu_128k: 'one' is no number"),
        ("8,2048,Redis,1,1", "line 2: no column peak_gb_32k"),
    ],
)
def test_a_bad_cell_is_named(reference: Path, row: str, message: str) -> None:
    file = reference / paper_tables.TABLES["1f1b"]
    file.write_text(f"{HEADER}\n{row}\n")
    with pytest.raises(ValueError, match=message):
        predict_paper.main([str(reference)])


def test_an_empty_selection_is_refused(reference: Path) -> None:
    with pytest.raises(ValueError, match="the tables have no such setup"):
        predict_paper.main([str(reference), "--gpus", "16"])
