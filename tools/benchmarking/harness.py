"""The harness of all benchmarks: ways in turn, clocks, medians, memory, and the report of a run."""

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import median
from tempfile import TemporaryFile
from typing import Any, Final, NamedTuple, TypeVar

import torch

from megatron.flags.declare import flag
from megatron.flags.ranges import COUNT

T = TypeVar("T")

FREED_AT_ONCE: Final = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
"""Environment of a process whose freed memory goes back at once: only then ``held`` tells much."""


@dataclass(frozen=True, kw_only=True)
class RoundFlags:
    """Rounds, and where their results go."""

    rounds: int = flag(5, "Times that every way runs.", COUNT)
    report: Path | None = flag(None, "Markdown file, besides what is printed.", unset="none")
    record: Path | None = flag(
        None, "JSON file with every measurement, the command and the machine.", unset="none"
    )


class Taken(NamedTuple):
    """Time of a piece of work.

    Attributes:
        seconds: by the clock.
        cpu: seconds that the processors worked for this process, in all its threads together.
    """

    seconds: float
    cpu: float


def timed(work: Callable[[], T], device: str = "cpu") -> tuple[T, Taken]:
    """Run ``work``; return its result and its time, on ``cuda`` until the GPU has done it."""
    _synchronize(device)
    begun, worked = time.perf_counter(), time.process_time()
    result = work()
    _synchronize(device)
    return result, Taken(time.perf_counter() - begun, time.process_time() - worked)


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def turns(ways: Sequence[T], rounds: int) -> Iterator[tuple[int, T]]:
    """Yield the number of every round with each way in turn.

    A machine drifts, so each round has all ways, and begins with another one.
    """
    for number in range(rounds):
        first = number % len(ways)
        yield from ((number, way) for way in (*ways[first:], *ways[:first]))


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Return the median and the range of values in words."""
    middle, low, high = (f"{f(values):.{digits}f}" for f in (median, min, max))
    return f"{middle} ({low} to {high})"


def ratios(own: Iterable[float], base: Iterable[float]) -> list[float]:
    """Return the ratios of values to the values of the same rounds."""
    return [one / other for one, other in zip(own, base, strict=True)]


def held() -> float:
    """Return the bytes of memory that this process occupies."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return float(pages * os.sysconf("SC_PAGE_SIZE"))


def apart(what: str, commands: Sequence[Sequence[str]], variables: Mapping[str, str]) -> list[Any]:
    """Run processes at once; return of each the JSON in the last line that it prints.

    Args:
        what: name of the work, for the message.
        commands: of the processes.
        variables: of their environment, besides those of this process.

    Raises:
        RuntimeError: a process failed; with its status and its last words.
    """
    with TemporaryFile("w+") as errors:
        started = [
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | dict(variables),
            )
            for command in commands
        ]
        printed = [process.communicate()[0] for process in started]
        errors.seek(0)
        said = errors.read()
    for process in started:
        if process.returncode:
            raise RuntimeError(f"{what} ended with {process.returncode}:\n{said[-3000:]}")
    return [json.loads(text.splitlines()[-1]) for text in printed]


def machine(device: str, allocator: str = "") -> str:
    """Return the description of the machine and its software.

    Args:
        device: that is measured, ``cpu`` or ``cuda``.
        allocator: of the memory of processes on CPUs; empty: the process's own.
    """
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    processor = f"{len(models)} x {models[0]}" if models else platform.processor()
    parts = [processor, platform.system(), f"PyTorch {torch.__version__}"]
    gpu = device == "cuda" and torch.cuda.is_available()
    if gpu:
        parts.insert(0, torch.cuda.get_device_name())
    elif allocator:
        parts.append(allocator)
    return ", ".join(parts)


@dataclass(frozen=True)
class Run:
    """A run of a benchmark, as its reports have it.

    Attributes:
        command: words of its command line, the tool first.
        device: that is measured, ``cpu`` or ``cuda``.
        said: what is measured, in a sentence or two.
        measured: every measurement; it grows as the lines of the report are made.
        allocator: as in ``machine``.
    """

    command: Sequence[str]
    device: str
    said: str
    measured: Any
    allocator: str = ""

    def publish(self, lines: Iterable[str], flags: RoundFlags) -> None:
        """Print the report line by line as it is made, and write the files that are asked for."""
        load = f"load {os.getloadavg()[0]:.1f} at the start"
        of_machine = f"{machine(self.device, self.allocator)}; {load}."
        command = " ".join(["python", *self.command])
        made = []
        for line in chain((f"    {command}", "", of_machine, "", self.said, ""), lines):
            made.append(line)
            print(line, flush=True)
        if flags.report is not None:
            flags.report.write_text("\n".join(made) + "\n", encoding="utf-8")
        if flags.record is not None:
            record = {"command": command, "machine": of_machine, "measured": self.measured}
            flags.record.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
