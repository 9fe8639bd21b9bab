"""The most memory a rank has held, for the one line that each rank prints."""

import re
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class PeakMemory:
    """Peaks since the start of the process, in bytes.

    Attributes:
        held: memory held by tensors on a GPU, by the whole process on a CPU.
        reserved: memory reserved by PyTorch's allocator on a GPU; ``None`` on a CPU.
    """

    held: int
    reserved: int | None = None


def peak_memory(device: torch.device) -> PeakMemory:
    """Read the peaks of this process on ``device``."""
    if device.type == "cuda":
        return PeakMemory(
            held=torch.cuda.max_memory_allocated(device),
            reserved=torch.cuda.max_memory_reserved(device),
        )
    return PeakMemory(held=_peak_resident())


def _peak_resident() -> int:
    """Return the peak resident set of this process, in bytes."""
    status = Path("/proc/self/status")
    # Better than ru_maxrss, which in a spawned process starts at its parent's size.
    if status.is_file():
        found = re.search(r"^VmHWM:\s+(\d+) kB$", status.read_text(), re.MULTILINE)
        if found is not None:
            return int(found.group(1)) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
