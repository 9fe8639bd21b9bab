"""Results come in input order, and processes end with the one that started them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.data.preparation.workers import in_order


def slow_at_first(number: int) -> int:
    time.sleep(0.05 if number == 0 else 0)
    return number * number


def dies(number: int) -> int:
    os._exit(1)


def test_results_come_in_order_and_few_inputs_are_read_ahead() -> None:
    read: list[int] = []

    def inputs() -> Iterator[int]:
        for number in range(40):
            read.append(number)
            yield number

    for number, taken in enumerate(in_order(slow_at_first, inputs(), 2)):
        assert taken == (number, number * number)
        assert len(read) <= number + 6
    assert len(read) == 40


def test_a_process_that_dies_is_told() -> None:
    with pytest.raises(ValueError, match=r"one of 2 processes died.*fewer --workers"):
        list(in_order(dies, [1, 2, 3], 2))


PARENT = """
import os, sys
from megatron.data.preparation.workers import in_order
if __name__ == "__main__":
    from itertools import count
    for _, pid in in_order(child, count(), 2):
        print(pid, flush=True)
"""


def test_workers_do_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text("import os\ndef child(n):\n    return os.getpid()\n")
    (tmp_path / "parent.py").write_text("from child import child\n" + PARENT)
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(tmp_path)])}
    command = [sys.executable, str(tmp_path / "parent.py")]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        workers = {int(run.stdout.readline()) for _ in range(20)}
        run.send_signal(signal.SIGKILL)
    assert workers
    until = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in workers) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
