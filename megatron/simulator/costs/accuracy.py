"""How far predictions were off where they were checked, by class of runs.

The runs are Megatron-LM's, measured by others: those of docs/reference/published_runs.csv, whose
errors ``tools/predict_published.py`` prints, and those of tables 5 (1F1B) and 6 (V-Half) of arXiv
2411.05288, whose errors ``tools/predict_paper.py`` prints. Tests predict them again and compare.
What causes the errors: docs/predictions.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

ALLOCATED_WITHIN: Final = 0.002
"""Share by which the bytes that this project's own CUDA code allocates differ from a dry run's at
most, on the pretended GPUs of the tests."""


@dataclass(frozen=True)
class RunClass:
    """A class of runs whose predictions err alike: GPU, t > 1, and several machines or one."""

    gpu: str
    shared: bool
    across: bool

    def __str__(self) -> str:
        """Return the class in words, as docs/predictions.md has it."""
        sharing = "t > 1" if self.shared else "t = 1"
        return f"{self.gpu}, {sharing}, {'across machines' if self.across else 'one machine'}"


@dataclass(frozen=True)
class TimeErrors:
    """Absolute errors of the time of iterations of so many runs, in percent."""

    runs: int
    mean: float
    most: float


def together(one: TimeErrors, other: TimeErrors) -> TimeErrors:
    """Return the errors over the runs of both."""
    runs = one.runs + other.runs
    mean = (one.runs * one.mean + other.runs * other.mean) / runs
    return TimeErrors(runs, round(mean, 1), max(one.most, other.most))


ITERATIONS: Final[Mapping[RunClass, TimeErrors]] = {
    RunClass("H100", shared=False, across=True): TimeErrors(1, 2.7, 2.7),
    RunClass("H100", shared=True, across=True): TimeErrors(2, 1.1, 1.8),
    RunClass("A100", shared=False, across=True): TimeErrors(1, 1.7, 1.7),
    RunClass("A100", shared=True, across=True): TimeErrors(19, 1.8, 6.3),
    RunClass("A100", shared=True, across=False): TimeErrors(2, 1.1, 2.1),
}
"""Errors of ``tools/predict_published.py``. None of these runs splits the vocabulary."""

PAPER: Final[Mapping[RunClass, TimeErrors]] = {
    RunClass("A100", shared=False, across=False): TimeErrors(40, 3.4, 13.8),
    RunClass("A100", shared=False, across=True): TimeErrors(122, 5.3, 15.9),
}
"""Errors of ``tools/predict_paper.py``. Most of these runs split the vocabulary."""

PUBLISHED: Final[Mapping[RunClass, TimeErrors]] = {
    **ITERATIONS,
    **{
        own: together(ITERATIONS[own], errors) if own in ITERATIONS else errors
        for own, errors in PAPER.items()
    },
}
"""Errors of all runs. Of a class that is absent no run was measured."""
