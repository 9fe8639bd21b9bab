"""tools/reproduce.py: iterations of known length, and the error that is printed."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools.synthetic_runs import as_csv, run

ROOT = Path(__file__).resolve().parents[2]
MEASURED_RUNS = ROOT / "docs/reference/a100_8gpu_seq2048.csv"
HEADER = (
    "method,seq_length,vocab_size,layers_on_last_stage,F_us,B_us,ST_us,IF_us,IB_us,p2p_us,"
    "tflops_per_gpu,iteration_ms"
)


def reproduce(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools/reproduce.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_1f1b_takes_the_time_of_the_textbook(tmp_path: Path) -> None:
    """With F = 1 and B = 2 ms on every rank: m + p - 1 slots of 3 ms."""
    file = tmp_path / "runs.csv"
    none = "0 0 0 0"
    row = f"2048,32000,4,1000 1000 1000 1000,2000 2000 2000 2000,{none},{none},{none},{none},1"
    file.write_text(f"{HEADER}\nbaseline,{row},33\nredis,{row},30\n")
    done = reproduce(str(file), "-m", "8")
    assert done.returncode == 0, done.stderr
    *_, first, second, mean, largest = done.stdout.splitlines()
    assert first.split() == ["baseline", "2048", "32000", "33", "33", "+0.00%"]
    assert second.split() == ["redis", "2048", "32000", "33", "30", "+10.00%"]
    assert mean == "mean abs error: 5.00 %"
    assert largest == "max abs error: 10.00 %"


def test_every_method_is_simulated(tmp_path: Path) -> None:
    methods = ("baseline", "redis", "vocab-1", "vocab-2", "interlaced")
    file = tmp_path / "runs.csv"
    file.write_text(as_csv(run(method, 64_000, iteration_ms=500) for method in methods))
    done = reproduce(str(file), "-m", "8", "--share-of-s", "0.5")
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[1:6]] == list(methods)


def test_real_runs_are_predicted() -> None:
    done = reproduce(str(MEASURED_RUNS))
    assert done.returncode == 0, done.stderr
    *rows, mean, largest = done.stdout.splitlines()[1:]
    assert len(rows) == 20
    assert float(mean.split()[-2]) <= 1.0
    assert float(largest.split()[-2]) <= 2.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.csv"], "cannot read nowhere.csv"),
        (["runs.csv"], "line 2, column F_us: 'fast' is not a time of 0 or more"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "runs.csv").write_text(f"{HEADER}\nbaseline,1,1,1,fast,1,1,1,1,1,1,1\n")
    command = [sys.executable, str(ROOT / "tools/reproduce.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
