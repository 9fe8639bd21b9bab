"""Figures that stand in several pages are the same in all of them."""

import re
from pathlib import Path
from statistics import mean
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
README: Final = (ROOT / "README.md").read_text()
PREDICTIONS: Final = (ROOT / "docs/predictions.md").read_text()
HOLDS_TODAY: Final = (ROOT / "docs/LOG.md").read_text().split("\n## ")[1]
DRAWN: Final = re.findall(r"\[\S+\]\(images/(\S+)\.svg\) \|$", README, re.MULTILINE)


def rows_of(text: str, head: str) -> list[list[str]]:
    """Return the cells of the table whose first line begins with ``head``, row by row."""
    table = text[text.index(head) :].split("\n\n")[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


@pytest.mark.parametrize("schedule", DRAWN)
def test_the_readme_has_the_times_of_the_pictures(schedule: str) -> None:
    """Of both panels; ``tools/draw.py`` writes the page of the pictures."""
    gallery = rows_of((ROOT / "images/README.md").read_text(), "| picture |")
    at = next(i for i, row in enumerate(gallery) if row[0] == f"[{schedule}]({schedule}.svg)")
    expected = [f"{time}, {idle}" for _, _, time, idle, _ in gallery[at : at + 2]]
    [row] = [row for row in rows_of(README, "| `--pipe") if row[0] == f"`{schedule}`"]
    assert row[3:5] == expected


def test_the_readme_has_the_times_of_its_benchmark() -> None:
    """Of the report to which the README leads below the table."""
    link = re.search(r"\]\((docs/benchmarks/[^)]+/report\.md)\)", README[README.index("| V |") :])
    assert link is not None
    text = (ROOT / link[1]).read_text()
    head = text[text.index("| V | schedule |") :].splitlines()[0]
    names = [cell.strip() for cell in head.split("|")[1:-1]]
    report = [dict(zip(names, row, strict=True)) for row in rows_of(text, head)]
    known = {
        (row["V"], row["schedule"], row["vocabulary"]): (
            float(row["time, ms"].replace(",", "")) / 1000,
            row["idle"],
        )
        for row in report
    }
    for v, *cells in rows_of(README, "| V |"):
        split, split_idle, zb_v, zb_v_idle, whole, whole_idle, zb_v_whole, *others = cells
        found = {
            (v, "1f1b", "vocab-2"): (split, split_idle),
            (v, "zb-v", "vocab-2"): (zb_v, zb_v_idle),
            (v, "1f1b", "none"): (whole, whole_idle),
            (v, "zb-v", "none"): (zb_v_whole, known[v, "zb-v", "none"][1]),
        }
        peers = ("single", "pytorch-1f1b", "pytorch-zbv")
        found |= {(v, peer, "none"): (cell, "") for peer, cell in zip(peers, others, strict=True)}
        for case, (time, idle) in found.items():
            seconds, known_idle = known[case]
            assert float(time) == pytest.approx(seconds, abs=0.006), case
            assert idle.replace(" ", "") == known_idle, case


def test_real_runs_have_the_errors_of_their_table() -> None:
    """The mean below the table of 20 runs, and the mean that the log says holds today."""
    table = rows_of(PREDICTIONS, "| method | 256k |")[1:]
    errors = [float(error) for row in table for error in row[3::3]]
    assert len(errors) == 20
    said = re.search(r"Mean absolute error ([\d.]+) %, largest ([\d.]+) %", PREDICTIONS)
    assert said is not None
    assert float(said[1]) == pytest.approx(mean(map(abs, errors)), abs=0.006)
    assert float(said[2]) == max(map(abs, errors))
    assert f"{said[1]} % in the mean of 20 A100 runs, {said[2]} % at most" in HOLDS_TODAY


def test_published_runs_have_the_errors_of_their_table_in_the_log() -> None:
    rows = {row[0]: row[1:3] for row in rows_of(PREDICTIONS, "| class |")}
    (fitted, own), (kept_out, of_kept) = rows["fitted"], rows["kept out"]
    assert (
        f"within {own} in the mean of {fitted} published runs that it was fitted to, {of_kept} of "
        f"{kept_out} kept out"
    ) in " ".join(HOLDS_TODAY.split())
