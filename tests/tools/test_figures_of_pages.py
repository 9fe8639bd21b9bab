"""Figures that stand in several pages are the same in all of them."""

import re
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
README: Final = (ROOT / "README.md").read_text()
PREDICTIONS: Final = (ROOT / "docs/predictions.md").read_text()
HOLDS_TODAY: Final = (ROOT / "docs/LOG.md").read_text().split("\n## ")[1]
SCHEDULES: Final = (ROOT / "docs/schedules.md").read_text()
DRAWN: Final = re.findall(r"\[\S+\]\(../images/(\S+)\.svg\) \|$", SCHEDULES, re.MULTILINE)


def rows_of(text: str, head: str) -> list[list[str]]:
    """Return the cells of the table whose first line begins with ``head``, row by row."""
    table = text[text.index(head) :].split("\n\n")[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


@pytest.mark.parametrize("schedule", DRAWN)
def test_the_page_of_the_schedules_has_the_times_of_the_pictures(schedule: str) -> None:
    """Of both panels; ``tools/draw.py`` writes the page of the pictures."""
    gallery = rows_of((ROOT / "images/README.md").read_text(), "| picture |")
    at = next(i for i, row in enumerate(gallery) if row[0] == f"[{schedule}]({schedule}.svg)")
    expected = [f"{time}, {idle}" for _, _, time, idle, _ in gallery[at : at + 2]]
    [row] = [row for row in rows_of(SCHEDULES, "| `--pipe") if row[0] == f"`{schedule}`"]
    assert row[3:5] == expected


RUNS: Final[Mapping[str, str]] = {
    "our 1F1B": "1f1b",
    "our ZB-V": "zb-v",
    "plain PyTorch, one process": "single",
    "PyTorch's 1F1B": "pytorch-1f1b",
    "PyTorch's ZB-V": "pytorch-zbv",
}
"""Runs of the README's table -> their schedules in the report."""


def test_the_readme_has_the_times_of_its_benchmark() -> None:
    """Of the report to which the README leads below the table."""
    head = "| vocabulary | run | 32k entries | 64k | 128k | 256k | idle at 256k |"
    link = re.search(r"\]\((docs/benchmarks/[^)]+/report\.md)\)", README[README.index(head) :])
    assert link is not None
    text = (ROOT / link[1]).read_text()
    heads = text[text.index("| V | schedule |") :].splitlines()[0]
    names = [cell.strip() for cell in heads.split("|")[1:-1]]
    report = [dict(zip(names, row, strict=True)) for row in rows_of(text, heads)]
    known = {(row["V"], row["schedule"], row["vocabulary"]): row for row in report}
    shown = set[tuple[str, str, str]]()
    for vocabulary, run, *cells, idle in rows_of(README, head):
        treatment = {"split": "vocab-2", "whole": "none"}[vocabulary]
        for v, seconds in zip(("32k", "64k", "128k", "256k"), cells, strict=True):
            case = (v, RUNS[run], treatment)
            milliseconds = float(known[case]["time, ms"].replace(",", ""))
            assert float(seconds) == pytest.approx(milliseconds / 1000, abs=0.006), case
            shown.add(case)
        assert idle.replace(" ", "") == known["256k", RUNS[run], treatment]["idle"]
    assert shown == {*known}


def test_the_readme_has_the_ratios_of_its_table() -> None:
    """At 256k: of a whole to a split vocabulary, of one process, and of PyTorch's 1F1B to ours."""
    rows = {(row[0], row[1]): float(row[5]) for row in rows_of(README, "| vocabulary | run |")}
    text = " ".join(README.split())
    said = re.search(r"1F1B takes ([\d.]+) times .*?, and our ZB-V ([\d.]+) times", text)
    of_one_process = re.search(r"our split runs are ([\d.]+) to ([\d.]+) times as fast", text)
    of_pytorch = re.search(r"our 1F1B is ([\d.]+) times as fast as PyTorch's 1F1B", text)
    assert said is not None
    assert of_one_process is not None
    assert of_pytorch is not None
    whole = rows["whole", "PyTorch's 1F1B"] / rows["whole", "our 1F1B"]
    assert float(of_pytorch[1]) == pytest.approx(whole, abs=0.006)
    process = rows["whole", "plain PyTorch, one process"]
    assert process == min(own for (vocabulary, _), own in rows.items() if vocabulary == "whole")
    for run, ratio, faster in zip(
        ("our 1F1B", "our ZB-V"), said.groups(), of_one_process.groups(), strict=True
    ):
        assert float(ratio) == pytest.approx(rows["whole", run] / rows["split", run], abs=0.006)
        assert float(faster) == pytest.approx(process / rows["split", run], abs=0.006)


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
