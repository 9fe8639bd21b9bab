"""tools/benchmarking/harness.py: ways take turns, and a run is told with all its measurements."""

import json
import os
import sys
import time
from pathlib import Path

import pytest
import torch

from tools.benchmarking.harness import (
    FREED_AT_ONCE,
    RoundFlags,
    Run,
    apart,
    held,
    ratios,
    spread,
    timed,
    turns,
)


def test_every_round_has_every_way_and_begins_with_another() -> None:
    order = list(turns("abc", 4))
    assert "".join(way for _, way in order) == "abcbcacababc"
    assert [number for number, _ in order] == sorted([0, 1, 2, 3] * 3)


def test_medians_ranges_and_ratios() -> None:
    assert spread([3.0, 1.0, 2.5]) == "2.50 (1.00 to 3.00)"
    assert spread([1.0, 2.0], 1) == "1.5 (1.0 to 2.0)"
    assert ratios([2.0, 9.0], [1.0, 3.0]) == [2.0, 3.0]


def test_sleep_takes_seconds_and_work_takes_the_processor() -> None:
    _, slept = timed(lambda: time.sleep(0.1))
    assert slept.seconds >= 0.1 > 0.05 > slept.cpu
    found, worked = timed(lambda: sum(range(1_000_000)))
    assert found == 499_999_500_000
    assert worked.cpu > 0


def test_memory_that_is_touched_is_held() -> None:
    before = held()
    block = torch.zeros(1 << 24) + 1
    assert held() - before >= 0.9 * 4 * len(block)


SAYS = "import json, os, sys; print('words'); print(json.dumps([sys.argv[1], os.environ['X']]))"


def test_processes_run_at_once_and_say_their_last_line() -> None:
    commands = [[sys.executable, "-c", SAYS, own] for own in "ab"]
    assert apart("both", commands, {"X": "y"}) == [["a", "y"], ["b", "y"]]
    assert "X" not in os.environ
    fails = "import sys; print('my fault', file=sys.stderr); sys.exit(3)"
    with pytest.raises(RuntimeError, match=r"both ended with 3:\n(?s:.*)my fault"):
        apart("both", [commands[0], [sys.executable, "-c", fails]], FREED_AT_ONCE | {"X": "y"})


def test_a_run_is_printed_and_written_with_its_command_machine_and_measurements(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, record = tmp_path / "report.md", tmp_path / "record.json"
    run = Run(["tools/x.py", "--rounds", "2"], "cpu", "What is measured.", [])

    def lines() -> list[str]:
        run.measured.append({"seconds": [1.0, 2.0]})
        return ["| a |"]

    run.publish(lines(), RoundFlags(report=page, record=record))
    printed = capsys.readouterr().out
    assert page.read_text() == printed
    command, _, machine, _, said, _, row = printed.splitlines()
    assert (command, said, row) == (
        "    python tools/x.py --rounds 2", "What is measured.", "| a |"
    )  # fmt: skip
    assert f"PyTorch {torch.__version__}" in machine
    found = json.loads(record.read_text())
    assert found == {
        "command": "python tools/x.py --rounds 2",
        "machine": machine,
        "measured": [{"seconds": [1.0, 2.0]}],
    }
