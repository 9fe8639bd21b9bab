"""Seconds of work on a device, and the form in which a section reports."""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any, Final

import torch
from torch import Tensor

from megatron.simulator.costs.gpus import Gpu, gpu_of_driver
from tools.pages import tables

WARM_UPS: Final = 3
ROUNDS: Final = 10

HEAD_START: Final = 40_000_000
"""Cycles, some 20 ms, that a GPU counts before it is timed. So the host has launched most kernels
before the first one runs, and what a host needs for a launch is not in the times of kernels."""


@dataclass(frozen=True)
class Scale:
    """How large the measured things are.

    Attributes:
        device: to measure on.
        small: sizes that a CPU computes in seconds; they show that the report works, no more.
        seconds: that the section has; only a section of many jobs looks at them.
    """

    device: torch.device
    small: bool
    seconds: float = float("inf")

    @property
    def rounds(self) -> int:
        """Number of timings of each operation."""
        return 2 if self.small else ROUNDS

    @property
    def gpu(self) -> Gpu | None:
        """The data sheet of the device; ``None``: a CPU, or a GPU whose sheet is not known."""
        on_gpu = self.device.type == "cuda"
        return gpu_of_driver(torch.cuda.get_device_name()) if on_gpu else None

    def drawn(self, *shape: int) -> Tensor:
        """Return random numbers on the device, in bf16."""
        return torch.randn(shape, device=self.device, dtype=torch.bfloat16)

    def forget_peak(self) -> None:
        """Give unused memory back, and measure its peak from now on."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)


@dataclass(frozen=True)
class Section:
    """The findings of a section.

    Attributes:
        lines: lines of Markdown.
        values: the same for programs.
    """

    lines: Sequence[str]
    values: dict[str, Any] = field(default_factory=dict)


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Return a Markdown table; all columns but the first are numbers."""
    marks = ["---", *(["--:"] * (len(head) - 1))]
    return [tables.row(*map(_cell, row)) for row in (head, marks, *rows)]


def in_a_line(row: Sequence[object]) -> str:
    """Return a row of a table to print at once: it is all that is known if a section is lost."""
    return " | ".join(map(_cell, row))


def reason(error: Exception) -> str:
    """Return the kind of an error and the first line of its words."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def seconds_of(scale: Scale, work: Callable[[], object], *, ahead: bool = True) -> float:
    """Return the median seconds of ``work``, once it has run some times; see ``laps``."""
    return laps(scale, [work], ahead=ahead)[0]


def laps(scale: Scale, works: Sequence[Callable[[], object]], *, ahead: bool = True) -> list[float]:
    """Return the median seconds of each of several things that run one after the other.

    Args:
        scale: with the device that is timed.
        works: what is timed.
        ahead: on a GPU, time kernels that the host has launched before; otherwise the GPU may wait
            for its host, as it does in training.
    """
    count = WARM_UPS + scale.rounds
    rounds = [_round(scale, works, ahead=ahead) for _ in range(count)][WARM_UPS:]
    return [median(times) for times in zip(*rounds, strict=True)]


def _round(scale: Scale, works: Sequence[Callable[[], object]], *, ahead: bool) -> list[float]:
    if scale.device.type != "cuda":
        marks = [time.perf_counter()]
        for work in works:
            work()
            marks.append(time.perf_counter())
        return [after - before for before, after in pairwise(marks)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(works) + 1)]
    if ahead:
        torch.cuda._sleep(HEAD_START)
    events[0].record()
    for work, event in zip(works, events[1:], strict=True):
        work()
        event.record()
    events[-1].synchronize()
    return [1e-3 * a.elapsed_time(b) for a, b in pairwise(events)]
