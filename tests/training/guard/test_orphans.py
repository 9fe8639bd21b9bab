"""A rank of torchrun ends with it, also where the kernel does not help; other processes stay."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks into /proc: Linux")

CHILD = """
import sys, time
from megatron.training.guard import orphans
if sys.argv[1] == "no help":
    orphans._ask_kernel = lambda: False
    orphans.LOOK_SECONDS = 0.05
orphans.end_with_torchrun()
print("ready", flush=True)
time.sleep(600)
"""

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", *sys.argv[1:]])
print(child.pid, flush=True)
child.wait()
"""


def is_running(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.mark.parametrize(
    ("how", "by_torchrun", "outlives"),
    [
        ("by the kernel", True, False),
        ("no help", True, False),
        ("by the kernel", False, True),
    ],
)
def test_a_rank_ends_with_torchrun(how: str, by_torchrun: bool, outlives: bool) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC")}
    environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[3])
    if by_torchrun:
        environment["TORCHELASTIC_RUN_ID"] = "a job"
    command = [sys.executable, "-c", PARENT, CHILD, how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert parent.stdout.readline() == "ready\n"
        try:
            parent.kill()
            parent.wait()
            end = time.monotonic() + (1.0 if outlives else 60.0)
            while is_running(child) and time.monotonic() < end:
                time.sleep(0.02)
            assert is_running(child) == outlives
        finally:
            if is_running(child):
                os.kill(child, signal.SIGKILL)
