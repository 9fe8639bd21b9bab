#!/usr/bin/env python3
"""Write docs/choosing-a-schedule.md: time against memory of every schedule, at three vocabularies.

python tools/choosing_page.py [--keep FOLDER]

It predicts with the dry run's cost model, and runs nothing. Every word about the figures is chosen
by them. Times that differ by less than predictions err are called a tie.
"""

import itertools
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.commands.environment import in_environment

with in_environment():
    from megatron.flags.command import read
    from megatron.flags.declare import flag
    from megatron.planning.forecast_run import RunForecast, forecast_run
    from megatron.planning.run_plan import asked
    from megatron.simulator.costs.accuracy import (
        OWN,
        PAPER,
        PAPER_NOT_FITTED,
        SHARED,
        RunClass,
        SharedClass,
    )
    from megatron.simulator.costs.gpus import GIB, GPUS
    from megatron.simulator.draw.picture import Box, Label, Line, Picture
    from megatron.simulator.draw.svg import paint_svg
    from tools.pages.tables import row, rule
    from tools.predictions.kept import kept
    from tools.predictions.scenarios import GPT_ON_8
    from tools.predictions.ties import error_of, is_tie

ROOT: Final = Path(__file__).resolve().parents[1]
PAGE: Final = ROOT / "docs" / "choosing-a-schedule.md"

DEVICE: Final = "H100"
"""The GPU with whose times plans are made, and jobs are predicted."""
JOB: Final = GPT_ON_8._replace(gpu=DEVICE, schedule="auto")

SIZES: Final = {"32k": 32_000, "128k": 128_000, "256k": 256_000}
TREATMENTS: Final = {"none": "B", "redis": "W", "vocab-2": "F"}
"""The treatments of the vocabulary, each with the kind of passes that lends it its colour."""
ERROR: Final = error_of(across=False)
"""Mean error of predictions for one machine, as a share of the time: a smaller gap is a tie."""

_MACHINE: Final = RunClass("A100", shared=False, across=False)
_PAPER, _APART = PAPER[_MACHINE], PAPER_NOT_FITTED[_MACHINE]
_OWN: Final = OWN[RunClass("H200", shared=False, across=False)]
_DENSE: Final = SHARED[SharedClass(DEVICE, eight_bits=False, experts=False)]

MADE: Final = "2026-11-29"
"""The day on which all predictions of this page were last made anew. Change it when you do so."""

INTRODUCTION: Final = f"""# Choosing a schedule

Which schedule is best depends on two things: how much memory there is, and how large the vocabulary
is beside the layers. [Schedules](schedules.md) lists all schedules and treatments, and the
[glossary](glossary.md) explains the words and the letters. This page has four parts:

* all schedules for one model, with vocabularies of 32k, 128k and 256k entries;
* [when splitting the vocabulary pays](#when-does-splitting-the-vocabulary-pay), for Llama 3;
* what [long samples](#long-samples) need;
* what is gained if [waits for tensor ranks](#hiding-the-waits-for-tensor-ranks) are hidden.

**All times and memories of jobs on this page are predicted**, except the times of other programs
that the page calls *measured*, and the gains of another program, [STP](#beside-stp). `python
tools/choosing_page.py` writes the figures of the first part (made on {MADE}) with the cost model
of the dry run, and runs no job. To get the table of your own job, add `--pipeline-schedule auto
--vocab-parallel auto --dry-run` to its command line.

**Whose rates.** Peak rates and bandwidths are those of NVIDIA's data sheet of the {DEVICE}. Kernels
and links attain shares of these rates. The shares of kernels were calibrated on published
iterations of H100s, those of links on runs of A100s ([constants](predictions.md#constants)). No job
of several GPUs has run this project's code. This page assumes that communications run while passes
compute, and that a collective slows a pass only by the multiprocessors that the collective
occupies. Real passes may lose more: on one H200 a product took 1.2 to 1.3 times as long while a
receive waited beside it, however many thread blocks the receive had
([report](benchmarks/2026-11-26-h200/report.md)).
<!-- from: benchmarks/2026-11-26-h200/report.md -->

**What is a tie.** Predictions for 8 GPUs in one machine could be compared with 40 runs of 1F1B on
8 A100s, in the tables of the paper on vocabulary parallelism (arXiv 2411.05288;
[comparison](predictions.md#the-papers-tables)). The predicted times were {ERROR:.1%} off on
average, and {_PAPER.most:.1f}% at most. Half of these runs have samples of 2,048 tokens. Constants
were fitted to pass times of such runs, so the other half is the better check: its times were
{_APART.mean:.1f}% off on average, and {_APART.most:.1f}% at most. This project's own iterations on
one H200 were {_OWN.mean:.1f}% off on average, and {_OWN.most:.1f}% at most. No pipeline on 8
H100s was among the compared runs. (Published iterations of dense models on H100s, with other
layouts, were {_DENSE.mean:.1f}% off on average, and {_DENSE.most:.1f}% at most.) Times that differ
by less than {ERROR:.1%} are called a tie here. That is a convention: {ERROR:.1%} is the mean error
of all 40 runs. Times that differ by more may also be in the other order on a machine.
<!-- from: predictions.md#predictions predictions.md#the-papers-tables -->

The job of the first part: 32 layers of h = 4096, 32 microbatches of one sample of 2048 tokens, a
pipeline of 8 {DEVICE} ({GPUS[DEVICE].memory / GIB:.0f} GiB), bf16, Adam, nothing recomputed. Three
[treatments](glossary.md#treatments-of-the-vocabulary) of the vocabulary are compared: whole on the
first and the last stage (`none`); whole on these two stages, with layers moved away from them
(`redis`); or split over all ranks (`vocab-2`). Schedules with several chunks on a rank have two
(`hanayo` has one wave). Tensors and communicators can use {GPUS[DEVICE].usable / GIB:.0f} GiB of a
GPU. A row with more does not fit; its time is for comparison.
<!-- figures: the memory of a data sheet, and a rule of the code -->

A ● in a table, and a name in a picture, is on the Pareto front: no other row takes as little time
and as little memory (before rounding). A ≈ marks rows that tie with the fastest. V is the number of
rows of the vocabulary.
"""

RUN: Final = "run: python tools/choosing_page.py"
"""The mark of figures that this tool writes (``tools/figures.py``)."""

SPLITTING: Final = "## When does splitting the vocabulary pay?"
"""Heading from which on other tools write the tables of the page."""


class Choice(NamedTuple):
    """A schedule with a treatment of the vocabulary, and the predictions for both.

    Attributes:
        schedule: name of the schedule.
        treatment: treatment of the vocabulary.
        seconds: predicted seconds of an iteration.
        mfu: model FLOPs as a share of the device's peak rate.
        idle: share of the time in which a rank runs no pass.
        memory: GiB of the fullest rank.
    """

    schedule: str
    treatment: str
    seconds: float
    mfu: float
    idle: float
    memory: float

    def is_beaten_by(self, other: "Choice") -> bool:
        """Whether ``other`` is at least as good in time and memory, and better in one of them."""
        own, its = (self.seconds, self.memory), (other.seconds, other.memory)
        return its != own and all(one >= two for one, two in zip(own, its, strict=True))

    @property
    def row(self) -> str:
        """The cells of its row of the table, without the first."""
        shares = f"{self.mfu:.1%}", f"{self.idle:.1%}"
        figures = f"{self.seconds:.3f}", *shares, f"{self.memory:.1f}"
        return row(f"`{self.schedule}`", self.treatment, *figures)

    @property
    def words(self) -> str:
        """Its name and figures."""
        return f"`{self.schedule}` ({self.seconds:.3f} s, {self.memory:.1f} GiB)"


def choices(vocab_size: int, schedules: Collection[str] | None = None) -> list[Choice]:
    """Return schedules with every treatment for a vocabulary, the fastest first.

    Args:
        vocab_size: entries of the vocabulary.
        schedules: their names; ``None``: all.
    """
    found = []
    for treatment in TREATMENTS:
        config = JOB._replace(treatment=treatment, vocabulary=vocab_size).config
        for candidate in asked(config):
            if schedules is None or candidate.schedule in schedules:
                forecast = forecast_run(config, candidate.run_plan, GPUS[DEVICE])
                found.append(_choice(candidate.schedule, treatment, forecast))
    return sorted(found, key=lambda one: (one.seconds, one.memory))


def _choice(schedule: str, treatment: str, found: RunForecast) -> Choice:
    outcome = found.outcome
    assert outcome.mfu is not None, "a data sheet has a peak rate"
    peak = max(outcome.peak) / GIB
    return Choice(schedule, treatment, outcome.seconds, outcome.mfu, outcome.idle, peak)


def front(found: Sequence[Choice]) -> list[Choice]:
    """Return the choices that no other choice beats in time and memory (the Pareto front)."""
    return [one for one in found if not any(one.is_beaten_by(other) for other in found)]


def advice(found: Sequence[Choice]) -> str:
    """Return a paragraph of advice that follows from the figures.

    Args:
        found: all choices, the fastest first.
    """
    best = front(found)
    fastest, smallest = best[0], min(best, key=lambda one: one.memory)
    tied = [one for one in best if _ties(one, fastest)]
    thrifty = min(tied, key=lambda one: one.memory)
    whole = next(one for one in found if one.treatment == "none")
    layers = next(one for one in found if one.treatment == "redis")
    said = f"Take {fastest.treatment} with {thrifty.words}"
    if thrifty is fastest:
        said += ": no schedule is predicted to be faster, and none that ties takes less memory."
    else:
        said += (
            f": it ties with the fastest, {fastest.words}, and takes "
            f"{round(fastest.memory, 1) - round(thrifty.memory, 1):.1f} GiB less."
        )
    if smallest is not thrifty:
        said += (
            f" {smallest.words} takes the least memory, and "
            f"{_more_time(smallest, fastest):.0%} more time than the fastest."
        )
    return said + (
        f" With the vocabulary on the first and the last stage, {whole.words} is best: "
        f"{_slower(whole, fastest)}. {_of_redis(found, layers, fastest)}"
    )


def _of_redis(found: Sequence[Choice], best: Choice, fastest: Choice) -> str:
    """Return a sentence about ``redis``, which may move no layer at all."""
    whole, moved = (
        {one.schedule: one[2:] for one in found if one.treatment == treatment}
        for treatment in ("none", "redis")
    )
    if whole == moved:
        return "`redis` moves no layer here, so its rows are those of `none`."
    return (
        f"With layers moved away from these stages (redis), {best.words} is best: "
        f"{_slower(best, fastest)}."
    )


def _ties(one: Choice, fastest: Choice) -> bool:
    return is_tie(one.seconds / fastest.seconds - 1, ERROR)


def _slower(one: Choice, fastest: Choice) -> str:
    """Return by how much a choice is slower than the fastest, in words."""
    if _ties(one, fastest):
        return "a tie with the fastest"
    return f"{_more_time(one, fastest):.0%} slower than the fastest"


def _more_time(one: Choice, fastest: Choice) -> float:
    """Return by how much a choice takes more time, as a share, from the seconds that are shown."""
    return round(one.seconds, 3) / round(fastest.seconds, 3) - 1


_WIDTH, _HEIGHT = 900, 380
_LEFT, _TOP, _RIGHT, _BOTTOM = 60, 50, 30, 60
_DOT: Final = 9


class _Axis(NamedTuple):
    """An axis of a chart: maps the figures ``low`` and ``high`` to two places in pixels."""

    low: float
    high: float
    begin: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self.begin + share * (self.end - self.begin)

    @property
    def ticks(self) -> list[float]:
        """Return four to ten round numbers within the axis."""
        step = next(
            digit * 10.0**power
            for power in range(-4, 6)
            for digit in (1, 2, 5)
            if (self.high - self.low) / (digit * 10.0**power) <= 10
        )
        first = -(-self.low // step)
        count = int((self.high - first * step) / step + 1e-9) + 1
        return [(first + n) * step for n in range(count)]

    @classmethod
    def around(cls, values: Sequence[float], begin: float, end: float) -> "_Axis":
        """Return an axis that holds all values, with some room beside them."""
        room = 0.06 * (max(values) - min(values)) or 1.0
        return cls(min(values) - room, max(values) + room, begin, end)


def chart(name: str, found: Sequence[Choice]) -> str:
    """Return an SVG chart of memory over seconds, with the names of the choices on the front.

    Args:
        name: name of the vocabulary.
        found: all choices.
    """
    x = _Axis.around([one.seconds for one in found], _LEFT, _WIDTH - _RIGHT)
    y = _Axis.around([one.memory for one in found], _HEIGHT - _BOTTOM, _TOP)
    best = front(found)
    lines = [
        Line(_LEFT, y.begin, _WIDTH - _RIGHT, y.begin),
        Line(_LEFT, y.begin, _LEFT, y.end),
        *_steps(best, x, y),
    ]
    title = f"V = {name}, predicted: seconds of an iteration against memory of the fullest rank"
    labels = [Label("title", 12, 24, title)]
    for value in x.ticks:
        lines.append(Line(x(value), y.begin, x(value), y.begin + 3))
        labels.append(Label("tick", x(value), y.begin + 14, f"{value:g} s"))
    for value in y.ticks:
        lines.append(Line(_LEFT - 3, y(value), _LEFT, y(value)))
        labels.append(Label("plain", 12, y(value) + 3, f"{value:g} GiB"))
    boxes = [_dot(one, x(one.seconds), y(one.memory)) for one in found]
    labels += [Label("plain", x(one.seconds) + 7, y(one.memory) - 6, one.schedule) for one in best]
    place = float(_LEFT)
    for treatment, kind in TREATMENTS.items():
        boxes.append(Box("pass", kind, place, _HEIGHT - 24, _DOT, _DOT))
        labels.append(Label("plain", place + 14, _HEIGHT - 16, treatment))
        place += 90
    return paint_svg(Picture(_WIDTH, _HEIGHT, boxes, labels, lines))


def _steps(best: Sequence[Choice], x: _Axis, y: _Axis) -> Iterator[Line]:
    """Yield the front as steps: choices above and to the right of the steps are beaten."""
    for one, other in itertools.pairwise(best):
        corner = x(other.seconds)
        yield Line(x(one.seconds), y(one.memory), corner, y(one.memory))
        yield Line(corner, y(one.memory), corner, y(other.memory))


def _dot(one: Choice, x: float, y: float) -> Box:
    note = f"{one.schedule}, {one.treatment}: {one.seconds:.3f} s, {one.memory:.1f} GiB"
    half = _DOT / 2
    return Box("pass", TREATMENTS[one.treatment], x - half, y - half, _DOT, _DOT, note)


def section(name: str, found: Sequence[Choice]) -> Iterator[str]:
    """Yield the lines about a vocabulary, in Markdown."""
    best = front(found)
    yield f"## V = {name}"
    yield ""
    yield advice(found)
    yield f"<!-- {RUN} -->"
    yield ""
    yield f"![Predicted time against memory](../images/{picture_of(name).name})"
    yield ""
    yield (
        "| | schedule | vocabulary | predicted s an iteration | predicted MFU | predicted idle "
        "| predicted GiB at most |"
    )
    yield rule(7, "lllr")
    for one in found:
        marks = f"{'●' if one in best else ''}{'≈' if _ties(one, best[0]) else ''}"
        yield f"| {marks} {one.row}"
    yield ""
    yield f"<!-- {RUN} -->"
    yield ""


def picture_of(name: str) -> Path:
    """Return the file of the chart of a vocabulary."""
    return ROOT / "images" / f"choosing-{name}.svg"


def write(root: Path = ROOT, keep: Path | None = None) -> None:
    """Write the page and its pictures; its last section stays as it is.

    ``keep`` is the folder of predictions that are kept.
    """
    page = root / "docs" / PAGE.name
    before = page.read_text(encoding="utf-8") if page.exists() else ""
    lines = [INTRODUCTION]
    for name, size in SIZES.items():
        found = kept(keep, f"choosing {name}", list[Choice], partial(choices, size))
        lines += section(name, found)
        (root / "images" / picture_of(name).name).write_text(chart(name, found), encoding="utf-8")
    _, heading, rest = before.partition(SPLITTING)
    page.write_text("\n".join([*lines, heading + rest]), encoding="utf-8")


@dataclass(frozen=True)
class PageFlags:
    """Predictions."""

    keep: Path | None = flag(
        None,
        "Folder in which the predictions for a vocabulary are kept. Started again with the same "
        "code, the tool goes on after the last of them.",
        unset="none is kept",
        metavar="FOLDER",
    )


if __name__ == "__main__":
    write(keep=read(None, __doc__, PageFlags)[PageFlags].keep)
