"""The last screen of a run: time, idle share, what the other treatment would take, what comes next.

Pure functions from values to text.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Final

from megatron.planning.other_treatment import Prediction
from megatron.schedules.counted import counted
from megatron.schedules.treatments import TREATMENTS

WIDTH: Final = 96
"""Columns of the screen."""

_NAME: Final = 56
"""Columns of a row's name."""


@dataclass(frozen=True)
class LastScreen:
    """The values of the last screen.

    Attributes:
        treatment: of the vocabulary.
        schedule: of the pipeline, in words.
        pipeline_size: pipeline ranks.
        seconds: of an iteration; the median of ``timed``.
        timed: the iterations that ``seconds`` is of, counted from 1: the first and the last.
        recorded: the iterations whose passes were recorded; empty: none were.
        idle: share of the time of the passes in which a rank runs no pass, over ranks and recorded
            iterations; ``None``: no pass was recorded.
        passes: seconds from the first pass of an iteration to the last, as measured.
        predicted: the job with the other treatment; ``None``: there is no prediction.
        unpredicted: why there is none; empty: nothing is to be said.
        files: lines on the files of the run.
        further: lines on flags to try next.
    """

    treatment: str
    schedule: str
    pipeline_size: int
    seconds: float
    timed: tuple[int, int]
    recorded: Sequence[int] = ()
    idle: float | None = None
    passes: float = 0.0
    predicted: Prediction | None = None
    unpredicted: str = ""
    files: Sequence[str] = ()
    further: Sequence[str] = ()


def screen_lines(values: LastScreen) -> Iterator[str]:
    """Yield the lines of the screen, between two rules."""
    yield "-" * WIDTH
    yield f" {'the run in short':{_NAME}}{'s an iteration':>16}{'idle':>9}"
    yield _row("measured", values.treatment, values, values.seconds, values.idle)
    found = values.predicted
    if found is not None:
        about = found.iteration(values.seconds)
        yield _row("predicted", found.treatment, values, about, found.idle)
    for paragraph in _paragraphs(values):
        yield from wrap(paragraph, WIDTH, initial_indent=" ", subsequent_indent="   ")
    yield "-" * WIDTH


def _row(
    origin: str, treatment: str, values: LastScreen, seconds: float, idle: float | None
) -> str:
    name = f"{origin}: {treatment}, {_where(treatment, values.pipeline_size)}"
    share = "" if idle is None else f"{idle:.1%}"
    return f" {name:{_NAME}}{seconds:>16.3g}{share:>9}"


def _where(treatment: str, ranks: int) -> str:
    """Return in words where the vocabulary layers are."""
    if ranks == 1:
        return "vocabulary on the only stage"
    if TREATMENTS[treatment].is_sharded:
        return f"vocabulary split over {ranks} ranks"
    return "vocabulary on the first and last stage"


def _paragraphs(values: LastScreen) -> Iterator[str]:
    """Yield the paragraphs below the table."""
    yield f"time: the median of {_iterations(values.timed)}; schedule {values.schedule}"
    if values.idle is not None:
        recorded = values.recorded[0], values.recorded[-1]
        yield (
            "idle: the share of the time of the passes, without the optimizer's step, in which a "
            f"rank runs no pass; the mean of the ranks in {_iterations(recorded)}"
        )
    if values.predicted is not None:
        yield f"predicted: {_source(values, values.predicted)}"
    elif values.unpredicted:
        yield f"the other treatment of the vocabulary is not predicted: {values.unpredicted}"
    yield from (f"files: {line}" for line in values.files)
    yield from (f"next: {line}" for line in values.further)


def _source(values: LastScreen, found: Prediction) -> str:
    """Return in words what a prediction is made from."""
    layer = f"{found.output_layer * 1e3:.3g} ms a microbatch"
    if found.at_best:
        work = (
            f"the output layer ({layer}: the last stage less its layers) shared by all ranks; "
            "collectives and the lookup of the split vocabulary, which this run has not measured, "
            "count as free, so it is a lower bound"
        )
    else:
        work = f"the work of S and T of all ranks ({layer}) on the last stage"
    return (
        f"the simulator runs the measured passes again, with {work}. Of this run it gives the "
        f"passes {found.own:.3g} s, measured {values.passes:.3g} s; of the other {found.other:.3g} "
        "s. The rest of an iteration, such as the optimizer's step, is taken to stay"
    )


def _iterations(ends: tuple[int, int]) -> str:
    first, last = ends
    if first == last:
        return f"iteration {first}"
    return f"{counted(last - first + 1, 'iteration')}, {first} to {last}"
