"""Results come in input order, and processes end with the one that started them."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from megatron.data.preparation.workers import in_order


def slow_at_first(number: int) -> int:
    time.sleep(0.05 if number == 0 else 0)
    return number * number


def started(folder: Path, child: str, parent: str) -> subprocess.Popen[str]:
    """Start a program ``parent`` that runs ``child`` of a module in other processes."""
    (folder / "child.py").write_text(child)
    (folder / "parent.py").write_text("from child import child\n" + parent)
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(folder)])}
    command = [sys.executable, str(folder / "parent.py")]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


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


DYING = """
from megatron.data.preparation.workers import in_order
if __name__ == "__main__":
    list(in_order(child, [1, 2, 3], 2))
"""


def test_a_process_that_dies_is_told(tmp_path: Path) -> None:
    run = started(tmp_path, "import os\ndef child(n):\n    os._exit(1)\n", DYING)
    with run:
        output = run.communicate()[0]
    assert run.returncode == 1
    assert re.search(r"ValueError: one of 2 processes died.*fewer --workers$", output)


PARENT = """
import os, sys
from megatron.data.preparation.workers import in_order
if __name__ == "__main__":
    from itertools import count
    for _, pid in in_order(child, count(), 2):
        print(pid, flush=True)
"""


def test_workers_do_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    child = "import os\ndef child(n):\n    return os.getpid()\n"
    with started(tmp_path, child, PARENT) as run:
        assert run.stdout is not None
        workers = {int(run.stdout.readline()) for _ in range(20)}
        run.send_signal(signal.SIGKILL)
    assert workers
    until = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in workers) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
