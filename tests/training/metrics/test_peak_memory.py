"""The peak of a process, seen from a fresh one, whose peak nothing else has raised."""

import subprocess
import sys

MIB = 1 << 20

FRESH = """
import torch
from megatron.training.metrics.peak_memory import peak_memory
before = peak_memory(torch.device("cpu")).held
filled = torch.ones(100 << 20, dtype=torch.uint8)
during = peak_memory(torch.device("cpu")).held
del filled
print(before, during, peak_memory(torch.device("cpu")).held)
"""


def test_the_peak_grows_with_what_is_held_and_stays() -> None:
    run = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, check=True)
    before, during, after = map(int, run.stdout.split())
    assert 95 * MIB < during - before < 110 * MIB
    assert after > during - MIB  # the kernel's counter is exact to some pages per core only
