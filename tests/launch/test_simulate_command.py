"""tools/simulate.py prints what the simulator finds, for costs given on the command line."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools/simulate.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def figures(*arguments: str) -> dict[str, Any]:
    done = run("--json", *arguments)
    assert done.returncode == 0, done.stderr
    parsed: dict[str, Any] = json.loads(done.stdout)
    return parsed


def test_1f1b_takes_the_time_of_the_textbook() -> None:
    """With F = 1 and B = 2 on every rank: m + p - 1 slots of 3, of which p - 1 are idle."""
    p, m = 4, 8
    found = figures("-p", str(p), "-m", str(m), "--output-layer", "0")
    assert found["end"] == pytest.approx(3 * (m + p - 1))
    assert found["bubble_rate_makespan"] == pytest.approx((p - 1) / (m + p - 1))
    assert found["in_flight"] == [4, 3, 2, 1]


@pytest.mark.parametrize("vocab", ["vocab-1", "vocab-2"])
def test_the_output_layer_is_the_same_work_wherever_it_runs(vocab: str) -> None:
    whole = figures("--vocab", "none", "--output-layer", "1.7")
    split = figures("--vocab", vocab, "--output-layer", "1.7", "--cost", "IF=0,IB=0")
    assert sum(split["work"]) == pytest.approx(sum(whole["work"]))
    assert max(split["work"]) == pytest.approx(min(split["work"]))
    assert max(whole["work"]) == whole["work"][-1] > whole["work"][0]


def test_costs_of_a_pass_of_a_rank_and_of_a_communication() -> None:
    spans = figures("-p", "2", "-m", "1", "--cost", "F=3:5,B=7,X=0.5")["spans"]
    taken = {(s["rank"], s["kind"]): s["end"] - s["start"] for s in spans}
    assert taken == pytest.approx(
        {(0, "F"): 3, (1, "F"): 5, (0, "B"): 7, (1, "B"): 7, (0, "X"): 0.5, (1, "X"): 0.5}
    )


def test_text_and_picture(tmp_path: Path) -> None:
    file = tmp_path / "plan.svg"
    done = run("--vocab", "vocab-2", "-p", "3", "--text", "--draw", str(file))
    assert done.stdout.splitlines()[0].startswith("1f1b, vocabulary vocab-2, p = 3, m = 8: ends at")
    assert sum(line.startswith("rank ") for line in done.stdout.splitlines()) == 3
    assert ElementTree.parse(file).getroot().tag.endswith("svg")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cost", "Q=1"], "'Q=1' is no cost"),
        (["--cost", "F"], "'F' is no cost: '' is not a time"),
        (["--cost", "F=-1"], "'-1' is not a time of 0 or more"),
        (["--cost", "F=nan"], "'nan' is not a time"),
        (["--cost", "X=1:2"], "'X=1:2' is no cost"),
        (["--cost", "F=1:2"], "F has 2 times for 4 ranks"),
        (["--output-layer", "big"], "--output-layer big"),
        (["-p", "0"], "at least 1 rank, got 0"),
        (["-m", "0"], "at least 1 microbatch, got 0"),
    ],
)
def test_what_makes_no_simulation_is_refused(arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert done.returncode != 0
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
