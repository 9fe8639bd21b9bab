"""tools/predict_paper.py: cells read, predicted and compared; errors named with their place."""

from pathlib import Path

import pytest

import tools.predict_paper as predict_paper
import tools.predictions.paper_tables as paper_tables

FIGURES = [
    f"{figure}_{size}" for figure in ("mfu", "peak_gb") for size in paper_tables.VOCABULARIES
]
HEADER = ",".join(["gpus", "seq_length", "method", *FIGURES])


@pytest.fixture
def reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(paper_tables, "MICROBATCHES", 8)
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
    rows, errors, _ = capsys.readouterr().out.strip().split("\n\n")
    heading, _, *lines = rows.splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert len(cells) == 8
    assert all(len(cell) == len(heading.strip("|").split("|")) for cell in cells)
    fitted = [cell for cell in cells if cell[5] != "-"]
    assert len(fitted) == 6
    for _, gpus, sequence, *_, mfu, predicted, error, _, _, _ in fitted:
        assert (gpus, sequence, mfu) == ("8", "2048", "40.0")
        assert float(error) == pytest.approx(float(predicted) - 40, abs=0.051)
    mean = sum(abs(float(cell[7])) for cell in fitted) / 6
    of_setup, of_table, of_class, of_all = errors.splitlines()[2:]
    assert of_setup.startswith("| 1f1b, 8 GPUs | 6 | ")
    assert of_class.startswith("| A100, t = 1, one machine | 6 | ") or of_table.startswith("| A100")
    assert float(of_all.split("|")[3]) == pytest.approx(mean, abs=0.06)


def test_tables_are_brought_up_to_date_in_the_page_that_has_them(
    reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    headings = (predict_paper.HEADING, predict_paper.ERRORS, predict_paper.SIGNED)
    page.write_text("\n\n".join(f"{heading}\n|---|\n| old |" for heading in headings) + "\n")
    predict_paper.main([str(reference), "--update", str(page)])
    printed = capsys.readouterr().out.splitlines()
    rows = [row for row in page.read_text().splitlines() if row and row != "|---|"]
    assert rows == [row for row in printed if row and not row.startswith("|---")]


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


def test_a_part_is_not_brought_up_to_date(
    reference: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        predict_paper.main([str(reference), "--gpus", "8", "--update", "page.md"])
    assert "--update page.md does not go with --gpus 8" in capsys.readouterr().err
