"""The errors of checked predictions, by class of runs.

The runs of the first two sets used Megatron-LM and were measured by other people. The first set is
docs/reference/published_runs.csv; ``tools/predict_published.py`` prints its errors. The second set
is tables 5 (1F1B) and 6 (V-Half) of arXiv 2411.05288; ``tools/predict_paper.py`` prints its errors.
The third set is docs/reference/own_runs.csv: this project's own code, on one GPU, for some seconds.
Tests predict these runs again and compare the errors. docs/predictions.md explains the causes of
the errors. A dry run names only errors of runs to which no constant was fitted. All runs, those
too, were seen while the model was made.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

ALLOCATED_WITHIN: Final = 0.002
"""Share by which the bytes that this project's own CUDA code allocates differ from a dry run's at
most, on the pretended GPUs of the tests."""


@dataclass(frozen=True)
class RunClass:
    """Runs with similar errors of prediction: by GPU, t > 1 or not, and one machine or several."""

    gpu: str
    shared: bool
    across: bool

    def __str__(self) -> str:
        """Return the class in the words of docs/predictions.md."""
        sharing = "t > 1" if self.shared else "t = 1"
        return f"{self.gpu}, {sharing}, {'across machines' if self.across else 'one machine'}"


@dataclass(frozen=True)
class TimeErrors:
    """Absolute errors of the predicted times of iterations, in percent, over a number of runs."""

    runs: int
    mean: float
    most: float


def together(one: TimeErrors, other: TimeErrors) -> TimeErrors:
    """Return the errors over all runs of ``one`` and ``other``."""
    runs = one.runs + other.runs
    mean = (one.runs * one.mean + other.runs * other.mean) / runs
    return TimeErrors(runs, round(mean, 1), max(one.most, other.most))


ITERATIONS: Final[Mapping[RunClass, TimeErrors]] = {
    RunClass("H100", shared=True, across=True): TimeErrors(1, 1.8, 1.8),
    RunClass("A100", shared=True, across=True): TimeErrors(12, 2.2, 6.3),
    RunClass("A100", shared=True, across=False): TimeErrors(1, 0.1, 0.1),
}
"""Errors of ``tools/predict_published.py`` for runs to which no constant was fitted. None of these
runs splits the vocabulary."""

FITTED: Final = frozenset({RunClass("H100", shared=False, across=True)})
"""Classes of which only runs were measured to which a constant was fitted."""

PAPER: Final[Mapping[RunClass, TimeErrors]] = {
    RunClass("A100", shared=False, across=False): TimeErrors(40, 3.4, 13.8),
    RunClass("A100", shared=False, across=True): TimeErrors(122, 4.6, 15.9),
}
"""Errors of ``tools/predict_paper.py``. Most of these runs split the vocabulary. Constants were
fitted to pass times of runs like half of those in one machine."""

PAPER_NOT_FITTED: Final[Mapping[RunClass, TimeErrors]] = {
    **PAPER,
    RunClass("A100", shared=False, across=False): TimeErrors(20, 4.2, 9.9),
}
"""As ``PAPER``, without the runs like those to whose pass times constants were fitted."""

OWN: Final[Mapping[RunClass, TimeErrors]] = {
    RunClass("H200", shared=False, across=False): TimeErrors(10, 20.1, 44.0),
}
"""Errors of this project's own runs on one GPU. None of these runs splits the vocabulary."""

PUBLISHED: Final[Mapping[RunClass, TimeErrors]] = {
    **ITERATIONS,
    **{
        own: together(ITERATIONS[own], errors) if own in ITERATIONS else errors
        for own, errors in PAPER_NOT_FITTED.items()
    },
}
"""Errors of all runs of Megatron-LM to which no constant was fitted. Of a class that is absent no
such run was measured, or only those of ``FITTED``."""
