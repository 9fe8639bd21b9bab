"""The machine of the report: the GPU, its driver, and the versions of the software."""

import platform
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import torch

from tools.gpu_sections.timing import Scale, Section

ROOT: Final = Path(__file__).resolve().parents[2]
OPTIONAL: Final = ("triton", "flash_attn", "transformer_engine", "apex", "liger_kernel")


def measure(scale: Scale) -> Section:
    """Ask the machine; nothing is timed."""
    facts = {
        "commit": _output("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD") or "unknown",
        "Python": platform.python_version(),
        "PyTorch": torch.__version__,
        "device": platform.processor() or platform.machine(),
    }
    if scale.device.type == "cuda":
        known = torch.cuda.get_device_properties(scale.device)
        facts |= {
            "device": f"{torch.cuda.device_count()} x {known.name}, {known.total_memory >> 30} GiB",
            "multiprocessors": str(known.multi_processor_count),
            "CUDA": str(torch.version.cuda),
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
            "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        }
    for name in OPTIONAL:
        facts[name] = _version(name) if find_spec(name) is not None else "not installed"
    return Section([f"* {name}: {value}" for name, value in facts.items()], dict(facts))


def _version(name: str) -> str:
    try:
        return metadata.version(name.replace("_", "-"))
    except metadata.PackageNotFoundError:
        return "installed"


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip().partition("\n")[0]


def contract(scale: Scale) -> Section:
    """Run the tests that hold every implementation of the kernels against formulas in float64.

    They are those of bf16: every further type would compile all programs once more.
    """
    chosen = ["-k", "gelu" if scale.small else "(cuda and bfloat16) or gpu"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels", *chosen],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    told = done.stdout.strip().splitlines()
    failed = [line for line in told if line.startswith(("FAILED", "ERROR"))]
    last = told[-1] if told else done.stderr.strip()[-200:]
    values = {"returncode": done.returncode, "summary": last, "failed": failed}
    return Section([last, *(f"* {line}" for line in failed)], values)
