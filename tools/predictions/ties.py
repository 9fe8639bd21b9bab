"""When two predicted times are a tie: they differ by less than such predictions err on average.

The error is that of the tables of arXiv 2411.05288 (``tools/predict_paper.py``): of all runs that
were measured, only these split the vocabulary. They ran on A100s. No split vocabulary was measured
on an H100, so the error there is not known.
"""

from megatron.simulator.costs.accuracy import PAPER, RunClass


def error_of(*, across: bool) -> float:
    """Return the mean error of predicted times, as a share of the time.

    Args:
        across: the job has several machines.
    """
    return PAPER[RunClass("A100", shared=False, across=across)].mean / 100


def is_tie(difference: float, error: float) -> bool:
    """Whether a difference is below the error, both as shares that are shown with one decimal."""
    return round(abs(difference), 3) < error
