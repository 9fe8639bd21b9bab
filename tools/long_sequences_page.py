#!/usr/bin/env python3
"""Predict what long samples need: a table of docs/choosing-a-schedule.md.

python tools/long_sequences_page.py [--update] [--keep FOLDER] [--only-kept]

Llama 3's 8B model with samples of 8k to 1M tokens. For every job the tool takes the fastest setting
that fits: layout of ranks, slices, recomputation, and activations on the host. It predicts by
counts of the code, as the dry run does, and runs nothing.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.commands.environment import in_environment

with in_environment():
    from megatron.flags.command import read
    from megatron.flags.declare import flag
    from tools.pages import tables
    from tools.predictions.kept import kept
    from tools.predictions.long_sequences import (
        GPU,
        JOBS,
        LENGTHS,
        PARTS,
        Cell,
        Job,
        Row,
        row_of,
    )

TOOL: Final = "long_sequences_page.py"

Rows = Mapping[tuple[Job, str], Row]
"""Rows by job and name of the length."""


class _NotMadeError(Exception):
    """A row is not kept, and is not to be made."""


def _refuse() -> Row:
    raise _NotMadeError


def told(job: Job, name: str, keep: Path | None, *, only_kept: bool) -> Row | None:
    """Return the row of a job with samples of a length; ``None``: it is not made."""
    make = _refuse if only_kept else lambda: row_of(job, LENGTHS[name])
    try:
        found: Row = kept(keep, f"long {job.gpus} {job.model} {name}", Row, make)
    except _NotMadeError:
        return None
    for line in summary(job, name, found):
        print(line, file=sys.stderr, flush=True)
    return found


def summary(job: Job, name: str, row: Row) -> Iterator[str]:
    """Yield the rows of the table for a job with samples of a length."""
    place = f"{job.gpus} {GPU} | {job.model} | {name}"
    for treatment, cells in row.items():
        best = cells["anything"]
        if best is None:
            yield f"| {place} | {treatment} | nothing fits |" + " |" * (len(PARTS) + 4)
            continue
        figures = f"{best.seconds:.2f} | {best.mfu:.1%} | {best.held:.1f}"
        losses = (_loss(best, cells[part]) for part in PARTS if part != "anything")
        words = f"{best.layout.words} | {best.slices} | {best.memory.words}"
        yield tables.row(place, treatment, words, figures, *losses)


def _loss(best: Cell, other: Cell | None) -> str:
    """Return how much longer the fastest setting without some part takes than the fastest."""
    if other is None:
        return "does not fit"
    return "not used" if other == best else f"{other.seconds / best.seconds - 1:+.1%}"


def table(rows: Rows) -> str:
    """Return the table in Markdown, and the rows that are missing."""
    without = " | ".join(f"without {part}" for part in PARTS if part != "anything")
    lines = [
        "| GPUs | model | tokens | vocabulary | ranks | slices | activations | predicted s "
        f"| predicted MFU | predicted GiB | {without} |",
        tables.rule(9 + len(PARTS), "llrllrlr"),
    ]
    for (job, name), row in rows.items():
        lines += summary(job, name, row)
    missing = [
        f"{name} on {job.gpus} {GPU}" for job in JOBS for name in LENGTHS if (job, name) not in rows
    ]
    if missing:
        lines += ["", f"Not predicted yet: {', '.join(missing)}."]
    return "\n".join(lines)


@dataclass(frozen=True)
class PageFlags(tables.PartFlags):
    """Tables."""

    only_kept: bool = flag(
        False, "Make no row: show those that are kept.", needs="--keep", lack="has no rows to show"
    )


def main() -> None:
    """Predict all rows, and print or write the table."""
    flags = read(None, __doc__, PageFlags)[PageFlags]
    rows = {
        (job, name): row
        for job in JOBS
        for name in LENGTHS
        if (row := told(job, name, flags.keep, only_kept=flags.only_kept)) is not None
    }
    tables.put([table(rows)], TOOL, update=flags.update)


if __name__ == "__main__":
    main()
