"""The errors of checked predictions, by class of runs.

The runs of the first two sets used Megatron-LM and were measured by other people. The first set is
docs/reference/published_runs.csv; ``tools/predict_published.py`` prints its errors. The second set
is tables 5 (1F1B) and 6 (V-Half) of arXiv 2411.05288; ``tools/predict_paper.py`` prints its errors.
The third set is docs/reference/own_runs.csv: this project's own code, on one GPU, for some seconds.
The fourth set is docs/reference/published_2026.csv: iterations of NeMo and Megatron-Bridge of 2024
to 2026, whose own program ``tools/predictions/shared_tables.py`` predicts.
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
    RunClass("H100", shared=False, across=True): TimeErrors(1, 18.4, 18.4),
    RunClass("H100", shared=True, across=True): TimeErrors(2, 10.6, 11.3),
    RunClass("A100", shared=True, across=True): TimeErrors(12, 2.2, 6.3),
    RunClass("A100", shared=True, across=False): TimeErrors(1, 0.1, 0.1),
}
"""Errors of ``tools/predict_published.py`` for runs to which no constant was fitted. None of these
runs splits the vocabulary."""

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
    RunClass("H200", shared=False, across=False): TimeErrors(10, 11.9, 51.2),
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
such run was measured."""


@dataclass(frozen=True)
class SharedClass:
    """Runs of the fourth set: by generation of GPUs, precision of products, and kind of model."""

    generation: str
    eight_bits: bool
    experts: bool

    def __str__(self) -> str:
        """Return the class in the words of docs/predictions.md."""
        precision = "8 bits" if self.eight_bits else "bf16"
        return f"{self.generation}, {precision}, {'mixtures' if self.experts else 'dense'}"


@dataclass(frozen=True)
class FamilyErrors:
    """Errors of the predicted times of iterations, in percent.

    Attributes:
        runs: number of iterations.
        families: number of families of models.
        mean: mean without signs.
        most: the largest, with its sign.
        signed: mean with signs; above 0: the runs were faster than predicted.
    """

    runs: int
    families: int
    mean: float
    most: float
    signed: float


SHARED: Final[Mapping[SharedClass, FamilyErrors]] = {
    SharedClass("H100", eight_bits=False, experts=False): FamilyErrors(35, 5, 3.4, 11.6, 2.0),
    SharedClass("H100", eight_bits=True, experts=False): FamilyErrors(54, 11, 5.3, 14.0, 1.9),
    SharedClass("H100", eight_bits=False, experts=True): FamilyErrors(10, 1, 15.6, -17.9, -13.6),
    SharedClass("H100", eight_bits=True, experts=True): FamilyErrors(10, 1, 23.8, -28.8, -23.8),
    SharedClass("Blackwell", eight_bits=True, experts=False): FamilyErrors(18, 6, 7.6, 27.4, -0.5),
    SharedClass("Blackwell", eight_bits=False, experts=True): FamilyErrors(
        9, 2, 37.1, -50.5, -36.4
    ),
    SharedClass("Blackwell", eight_bits=True, experts=True): FamilyErrors(
        40, 7, 21.5, -65.6, -13.4
    ),
}
"""Errors of ``tools/predictions/shared_tables.py`` for mixtures, to which no constant was fitted.
Those of ``calibrate_shared.py`` for dense models: of each family when constants were fitted to the
others."""

_GENERATIONS: Final = {
    **dict.fromkeys(("H100", "H200"), "H100"),
    **dict.fromkeys(("B200", "B300", "GB200", "GB300"), "Blackwell"),
}


def nearest_shared(gpu: str, *, eight_bits: bool, experts: bool) -> SharedClass | None:
    """Return the class of the fourth set that is nearest to a run.

    It has the same generation of GPUs, then the same kind of model, then the same precision.

    Args:
        gpu: name of the GPU, as in ``GPUS``.
        eight_bits: whether products are in 8 bits.
        experts: whether the model has experts.

    Returns:
        The class; ``None``: no GPU of the generation is in the set.
    """
    generation = _GENERATIONS.get(gpu)
    alike = [own for own in SHARED if own.generation == generation]
    return max(
        alike,
        key=lambda own: (own.experts == experts, own.eight_bits == eight_bits),
        default=None,
    )
