#!/usr/bin/env python3
"""Predict what pairs of passes hide: tables of docs/choosing-a-schedule.md.

python tools/pairs_page.py [--update] [--keep FOLDER]

It predicts with the dry run's cost model, and runs nothing.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.commands.environment import in_environment

with in_environment():
    from megatron.flags.command import read
    from tools.pages import tables
    from tools.pages.tables import percent, row, table
    from tools.predictions.paired import PLACES, Figures, Job, figures, pass_waits
    from tools.predictions.paired_jobs import (
        SETTINGS,
        Layout,
        Setting,
        jobs_of_passes,
        layouts,
        stp_jobs,
        wide_jobs,
    )

TOOL: Final = "pairs_page.py"
COLUMNS: Final = (
    *("vocabulary", "schedule", "predicted s", "with pairs", "predicted exposed", "with pairs"),
    *("slower beside collectives", "with pairs"),
    *("predicted idle", "with pairs", "predicted GiB", "with pairs"),
)
PLACE_COLUMNS: Final = (
    *("model, GPUs", "vocabulary", "schedule", "exposed", "F of the warm-up", "B of the cool-down"),
    *("other F and B alone", "pairs of F and B", "other pairs", "W alone"),
)
PASS_COLUMNS: Final = (
    *("model, GPUs", "schedule", "pass", "predicted ms alone", "of it waits"),
    *("of these another pass may hide", "switches"),
)
STP_COLUMNS: Final = (
    *("t, p", "sequence parallelism", "schedule", "predicted s", "predicted exposed"),
    *("predicted idle", "predicted GiB", "predicted gain over interleaved", "STP's gain"),
)


def _exposed(own: Figures) -> str:
    """Return the exposed seconds, and their share of an iteration."""
    return f"{own.exposed:.2f} s, {percent(own.exposed / own.seconds)}"


def _memory(own: Figures) -> str:
    """Return the GiB of the fullest rank, and whether they are too many."""
    return f"{own.memory:.1f}{'' if own.fits else ', does not fit'}"


def _schedule(job: Job) -> str:
    return f"`{job.schedule}`" + (f", limit {job.limit}" if job.limit else "")


def job_row(job: Job, keep: Path | None = None) -> str:
    """Return the row of a job, without and with pairs."""
    both = [figures(job, keep, paired=paired) for paired in (False, True)]
    cells = [
        *(f"{own.seconds:.2f}" for own in both),
        *map(_exposed, both),
        *(percent(own.slower / own.seconds) for own in both),
        *(percent(own.idle) for own in both),
        *map(_memory, both),
    ]
    return row(job.treatment, _schedule(job), *cells)


def layout_lines(layout: Layout, keep: Path | None = None) -> Iterator[str]:
    """Yield the lines of a layout: what it is, and its table."""
    yield f"**{layout.title}.** {layout.source}."
    yield ""
    yield from table(COLUMNS, (), "llr")
    for job in layout.jobs:
        yield job_row(job, keep)


def all_layouts(keep: Path | None = None) -> Iterator[str]:
    """Yield the lines of all layouts."""
    for place, layout in enumerate(layouts()):
        yield from [""] * bool(place)
        yield from layout_lines(layout, keep)


def place_row(job: Job, keep: Path | None = None) -> str:
    """Return where the waits of a job with pairs stay exposed, in percent of an iteration."""
    own = figures(job, keep, paired=True)
    shares = (own.places[place] / own.seconds for place in PLACES)
    total = percent(own.exposed / own.seconds)
    return row(job.name, job.treatment, _schedule(job), total, *map(percent, shares))


def all_places(keep: Path | None = None) -> Iterator[str]:
    """Yield the table of exposed waits at t = 8."""
    yield from table(PLACE_COLUMNS, (), "lllr")
    for job in wide_jobs():
        yield place_row(job, keep)


def pass_rows(job: Job) -> Iterator[str]:
    """Yield what the passes of a job wait for, in ms."""
    for own in pass_waits(job.forecast(paired=True)):
        times = (f"{1e3 * each:.2f}" for each in (own.seconds, own.waits, own.hidden))
        yield row(job.name, _schedule(job), own.kind, *times, own.switches)


def all_passes(_: Path | None = None) -> Iterator[str]:
    """Yield the table of passes."""
    yield from table(PASS_COLUMNS, (), "lllr")
    for job in jobs_of_passes():
        yield from pass_rows(job)


def stp_rows(setting: Setting, keep: Path | None = None) -> Iterator[str]:
    """Yield the rows of a setting of STP; all gains are over interleaved 1F1B without pairs."""
    first = None
    for job in stp_jobs(setting):
        for paired in (False, True):
            own = figures(job, keep, paired=paired)
            first = own.seconds if first is None else first
            is_theirs = paired and job.schedule == "dualpipe-v"
            yield row(
                f"{setting.tensor}, {setting.pipeline}",
                "yes" if setting.parts else "no",
                f"`{job.schedule}`{', pairs' if paired else ''}",
                f"{own.seconds:.2f}",
                _exposed(own),
                percent(own.idle),
                _memory(own),
                percent(first / own.seconds - 1, "+"),
                setting.gain if is_theirs else "",
            ).replace("|  |", "| |")


def stp(keep: Path | None = None) -> Iterator[str]:
    """Yield the table of STP's settings."""
    yield from table(STP_COLUMNS, (), "lllr")
    for setting in SETTINGS:
        yield from stp_rows(setting, keep)


@dataclass(frozen=True)
class PageFlags(tables.PartFlags):
    """Tables."""


def main() -> None:
    """Predict all rows, and print or write the tables."""
    flags = read(None, __doc__, PageFlags)[PageFlags]
    texts = []
    for part in (all_layouts, all_places, all_passes, stp):
        lines = []
        for line in part(flags.keep):
            lines.append(line)
            print(line, file=sys.stderr, flush=True)
        texts.append("\n".join(lines))
    tables.put(texts, TOOL, update=flags.update)


if __name__ == "__main__":
    main()
