"""The benchmark of checkpoints times every way, on one rank and on two."""

from pathlib import Path

import pytest

from tools.benchmarking.harness import Taken
from tools.checkpoint_benchmark import WAYS, main, report


def test_ratios_are_formed_within_a_round() -> None:
    fast = {way: Taken(1.0, 0.5) for way in WAYS} | {"save": Taken(2.0, 0.5)}
    slow = {way: Taken(10.0, 5.0) for way in WAYS} | {"save": Taken(11.0, 5.0)}
    rows = {line.split(" | ")[0].strip("| "): line for line in report([fast, slow, fast])}
    assert rows["save"] == "| save | 2.00 (2.00 to 11.00) | 0.50 | 2.00 (1.10 to 2.00) |"
    assert rows["stall"].endswith("| 1.00 (1.00 to 1.00) |")
    assert rows["background"].endswith("| 0.50 |  |")


@pytest.mark.full
def test_it_runs_and_leaves_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    main(["--folder", str(tmp_path), "--gigabytes", "0.0001", "--ranks", "2", "--rounds", "2"])
    printed = capfd.readouterr().out
    assert "GB on 2 ranks, 2 rounds" in printed
    for way in WAYS:
        assert f"| {way} | " in printed
    assert not list(tmp_path.iterdir())
