#!/usr/bin/env python3
"""Predict where splitting the vocabulary pays: tables of docs/choosing-a-schedule.md.

python tools/splitting_page.py [--update] [--keep FOLDER]

Llama 3's models on 8 to 512 GPUs, with three vocabularies and every treatment of them. The tool
predicts by counts of the code, as the dry run does, and runs nothing. A gain below the error of
such predictions is called a tie.
"""

import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.commands.environment import in_environment

with in_environment():
    from megatron.flags.command import read
    from tools.pages import tables
    from tools.pages.tables import row
    from tools.predictions.kept import kept
    from tools.predictions.splitting import (
        JOBS,
        TREATMENTS,
        VOCABULARIES,
        Job,
        Row,
        row_of,
    )
    from tools.predictions.ties import error_of, is_tie

TOOL: Final = "splitting_page.py"
MACHINE: Final = 8
"""GPUs of a machine."""


def told(asked_for: tuple[Job, str], keep: Path | None = None) -> Row:
    """Return the row of a job with a vocabulary, given by name, and print it as progress.

    ``keep`` is the folder of rows that are kept.
    """
    job, name = asked_for
    named = f"{job.words} {' '.join(job.schedules)} {job.replicas} {name}"
    found: Row = kept(keep, named, Row, lambda: row_of(asked_for))
    print(summary(*asked_for, found), file=sys.stderr, flush=True)
    return found


def summary(job: Job, name: str, found: Row) -> str:
    """Return a row of the table of seconds, the fastest treatment in bold."""
    fastest = min((own.seconds for own in found.values() if own), default=0.0)
    cells = [
        "-" if own is None else f"**{own.words}**" if own.seconds == fastest else own.words
        for own in found.values()
    ]
    return row(job.words, name, *cells, gain(found, job))


def gain(found: Row, job: Job) -> str:
    """Return how much faster the best split vocabulary is than the best whole vocabulary.

    Args:
        found: the row of the job.
        job: the job; predictions for several machines have larger errors.
    """
    whole, split = (
        min((own.seconds for name in names if (own := found[name])), default=None)
        for names in (TREATMENTS[:2], TREATMENTS[2:])
    )
    if whole is None or split is None:
        return "-"
    error = error_of(across=job.gpus > MACHINE)
    return f"{whole / split - 1:+.1%}{', a tie' if is_tie(whole / split - 1, error) else ''}"


def loss_rows(job: Job, name: str, found: Row) -> Iterator[str]:
    """Yield rows of the table of losses."""
    for treatment, own in found.items():
        if own:
            shares = (f"{100 * share:.1f}" for share in own.losses)
            yield row(job.words, name, treatment, own.name, *shares, f"{own.memory:.1f}")


def table(jobs: Sequence[tuple[Job, str]], rows: Sequence[Row]) -> str:
    """Return both tables, in Markdown."""
    lines = [
        "| GPUs | model | t, p | V | predicted s, none | predicted s, redis "
        "| predicted s, vocab-1 | predicted s, vocab-2 | predicted gain |",
        tables.rule(9, "lllrllllr"),
        *(summary(*asked_for, found) for asked_for, found in zip(jobs, rows, strict=True)),
        "",
        "<details><summary>What each is predicted to lose, in percent of its time</summary>",
        "",
        "| GPUs | model | t, p | V | treatment | schedule | idle | vocabulary | network | tensor "
        "| products | predicted GiB |",
        tables.rule(12, "lllrllr"),
    ]
    for asked_for, found in zip(jobs, rows, strict=True):
        lines += loss_rows(*asked_for, found)
    return "\n".join([*lines, "", "</details>"])


@dataclass(frozen=True)
class PageFlags(tables.PartFlags):
    """Tables."""


def main() -> None:
    """Predict all rows with two processes, and print or write the tables."""
    flags = read(None, __doc__, PageFlags)[PageFlags]
    jobs = [(job, name) for job in JOBS for name in VOCABULARIES]
    with ProcessPoolExecutor(2) as pool:
        text = table(jobs, list(pool.map(partial(told, keep=flags.keep), jobs)))
    tables.put([text], TOOL, update=flags.update)


if __name__ == "__main__":
    main()
