"""How far predictions were off where they were checked.

The runs are those of tables 5 (1F1B) and 6 (V-Half) of arXiv 2411.05288: Megatron-LM on A100s. Each
figure is what ``tools/predict_paper.py`` prints; ``tests/tools/test_paper_tables.py`` predicts all
cells again and compares. What causes the errors: docs/predictions.md.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Errors:
    """Absolute errors of predictions over measured runs.

    Attributes:
        runs: how many were compared.
        mfu: mean error of the MFU, in points.
        most_mfu: largest error of the MFU, in points.
        memory: mean error of the fullest rank's memory, in percent of what was measured.
        most_memory: largest error of it, in percent.
    """

    runs: int
    mfu: float
    most_mfu: float
    memory: float
    most_memory: float


def together(parts: Iterable[Errors]) -> Errors:
    """Return the errors over the runs of all ``parts``.

    Args:
        parts: errors over different runs; one at least.
    """
    known = list(parts)
    runs = sum(part.runs for part in known)
    return Errors(
        runs,
        sum(part.runs * part.mfu for part in known) / runs,
        max(part.most_mfu for part in known),
        sum(part.runs * part.memory for part in known) / runs,
        max(part.most_memory for part in known),
    )


CHECKED: Final[Mapping[str, Mapping[int, Errors]]] = {
    "1f1b": {
        8: Errors(40, 2.72, 7.50, 2.33, 3.51),
        16: Errors(40, 1.66, 6.70, 2.45, 3.69),
        32: Errors(36, 1.16, 5.05, 2.90, 4.61),
    },
    "v-half": {
        16: Errors(16, 2.14, 3.95, 3.66, 7.41),
        24: Errors(16, 3.78, 6.83, 3.10, 5.82),
        32: Errors(14, 5.60, 8.05, 2.89, 4.71),
    },
}
"""Schedule of the table -> GPUs -> errors."""

ALLOCATED_WITHIN: Final = 0.006
"""Share by which the bytes that this project's own CUDA code allocates differ from a dry run's at
most, on the pretended GPUs of the tests."""


@dataclass(frozen=True)
class RunClass:
    """A class of runs whose predictions err alike.

    Attributes:
        gpu: the kind of GPU.
        shared: several ranks share a layer (t > 1).
        across: the run has several machines.
    """

    gpu: str
    shared: bool
    across: bool

    def __str__(self) -> str:
        """Return the class in words, as docs/predictions.md has it."""
        sharing = "t > 1" if self.shared else "t = 1"
        return f"{self.gpu}, {sharing}, {'across machines' if self.across else 'one machine'}"


@dataclass(frozen=True)
class TimeErrors:
    """Absolute errors of the time of published iterations, in percent.

    Attributes:
        runs: how many were compared.
        mean: mean error.
        most: largest error.
    """

    runs: int
    mean: float
    most: float


PUBLISHED: Final[Mapping[RunClass, TimeErrors]] = {
    RunClass("H100", shared=False, across=True): TimeErrors(1, 2.6, 2.6),
    RunClass("H100", shared=True, across=True): TimeErrors(2, 1.1, 1.7),
    RunClass("A100", shared=False, across=True): TimeErrors(1, 1.6, 1.6),
    RunClass("A100", shared=True, across=True): TimeErrors(19, 1.8, 6.8),
    RunClass("A100", shared=True, across=False): TimeErrors(2, 1.1, 2.1),
}
"""Errors of ``tools/predict_published.py`` by class. Nothing was measured of absent classes, but
for runs of A100s with t = 1 in one machine, which are in ``CHECKED``."""
