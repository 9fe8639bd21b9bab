#!/usr/bin/env python3
"""Compare the schedules with published bubbles and with themselves: docs/benchmarks, *-schedules.

python tools/schedule_report.py --tables docs/reference --seconds 60 > report.md

The published tables (arXiv 2401.10241, tables 5 and 8) come as CSV: model, p, m, the times of F, B
and W and of one transfer in microseconds, and the bubble rate of every schedule.
"""

import csv
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.flags.command import read
from megatron.flags.declare import flag, required
from megatron.flags.ranges import NOT_NEGATIVE
from megatron.schedules.catalogue import SCHEDULES, TRAITS
from megatron.schedules.costs import Costs
from megatron.schedules.request import DEFAULT_SECONDS, Request
from megatron.simulator.scenario import Scenario, Simulation, run
from tools.pages.tables import row as row_of
from tools.pages.tables import rule, table

CHUNKS: Final[Mapping[str, int]] = {"1.5B": 3, "6.2B": 4, "14.6B": 3, "28.3B": 2}
"""Chunks of a rank of 1F1B-I in table 5: each transformer layer is a chunk (section 5.1), so a rank
has as many chunks as layers. In table 8 a rank has two chunks, as in ZB-V."""
NAMES: Final[Mapping[str, str]] = {
    "1F1B": "1f1b",
    "1F1B-I": "interleaved",
    "ZB-H1": "zb-h1",
    "ZB-H2": "zb-h2",
    "ZB-1p": "zb-1p",
    "ZB-2p": "zb-2p",
    "ZB-V": "zb-v",
}
PROVEN: Final = ((2, 4), (2, 8), (3, 6), (3, 9), (4, 8))
"""Pairs (p, m) for which the solver CP-SAT searches a proof."""


def published(folder: Path) -> Iterator[str]:
    """Yield the table of the published bubbles and our bubbles, in percent."""
    columns = list(NAMES)
    yield from table(("model", "p", "m", *columns), ())
    for number in ("5", "8"):
        with (folder / f"zero_bubble_table{number}.csv").open() as file:
            for row in csv.DictReader(file):
                cells = (_against(row, name, number) if name in row else "" for name in columns)
                yield row_of(row["model"], row["p"], row["m"], *cells)


def _against(row: Mapping[str, str], name: str, table: str) -> str:
    """Return our bubble beside the published bubble."""
    simulated = run(Scenario(_published_request(row, name, table)))
    return f"{simulated.timeline.bubble_rate():.2%} ({float(row[name]):.2%})"


def _published_request(row: Mapping[str, str], name: str, table: str) -> Request:
    prefix, whole = ("", 1) if table == "5" else ("chunk_", 2)  # table 8 has half stages
    if name == "1F1B-I":
        chunks = CHUNKS[row["model"]] if table == "5" else 2
    else:
        chunks = 2 if name == "ZB-V" else 1
    times = {kind: float(row[f"{prefix}{kind}_us"]) * whole / chunks for kind in "FBW"}
    transfer = float(row["p2p_us"])
    costs = Costs(
        {"F": times["F"], "B": times["B"], "W": times["W"]}, {"X": transfer, "G": transfer}
    )
    return Request(
        NAMES[name],
        "none",
        int(row["p"]),
        int(row["m"]),
        costs,
        chunks=chunks if name == "1F1B-I" else None,
    )


def anchors() -> Iterator[str]:
    """Yield the bubble of every treatment of the vocabulary, at F = B = W = 1, S = T = 0.25."""
    treatments = ("none", "vocab-2", "vocab-1", "naive", "interlaced")
    yield from table(("schedule", "m", *treatments), ())
    for name in (name for name, known in SCHEDULES.items() if not known.searched):
        for microbatches in (24, 64):
            cells = []
            for vocabulary in treatments:
                found = _unit(name, vocabulary, 8, microbatches)
                held = f"{max(found.in_flight):g}"
                cells.append(f"{found.timeline.bubble_rate():.2%} ({held})")
            yield row_of(name, microbatches, *cells)


def _unit(
    name: str,
    vocabulary: str,
    ranks: int,
    microbatches: int,
    memory_limit: float | None = None,
    seconds: float = DEFAULT_SECONDS,
) -> Simulation:
    stage = 1 / TRAITS[name].chunks
    costs = Costs(
        {"F": stage, "B": stage, "W": stage, "S": 0.25, "E": 0, "T": 0.25, "IF": 0, "IB": 0}
    )
    request = Request(
        name, vocabulary, ranks, microbatches, costs, memory_limit=memory_limit, seconds=seconds
    )
    return run(Scenario(request))


def proven(seconds: float) -> Iterator[str]:
    """Yield the bounds that CP-SAT proves for one chunk per rank, beside our own plans."""
    yield "| p | m | vocabulary | limit | zb-auto | optimal | bound | seconds |"
    yield rule(8, "rrlr")
    for ranks, microbatches in PROVEN:
        for vocabulary, more in (("none", 0), ("vocab-2", 1), ("vocab-1", 2)):
            limit = float(ranks + more)
            ours = _unit("zb-auto", vocabulary, ranks, microbatches, limit)
            begun = time.monotonic()
            best = _unit("optimal", vocabulary, ranks, microbatches, limit, seconds)
            took = time.monotonic() - begun
            work = sum(ours.timeline.work(rank) for rank in range(ranks)) / ranks
            floor = 1 - work / best.bound if best.bound else 0.0
            yield (
                f"| {ranks} | {microbatches} | {vocabulary} | {limit:g} "
                f"| {ours.timeline.bubble_rate():.2%} | {best.timeline.bubble_rate():.2%} "
                f"| {floor:.2%} | {took:.0f} |"
            )


@dataclass(frozen=True)
class TableFlags:
    """Tables."""

    tables: Path = required("Folder of the published CSVs.")
    seconds: float = flag(60.0, "For each proof.", NOT_NEGATIVE)


def main(argv: Sequence[str] | None = None) -> None:
    """Print every table as soon as it is ready."""
    options = read(argv, __doc__, TableFlags)[TableFlags]
    for title, lines in (
        ("Published bubbles: ours (published)", published(options.tables)),
        ("What the vocabulary costs: bubble (microbatches in flight)", anchors()),
        ("What is proven", proven(options.seconds)),
    ):
        print(f"\n## {title}\n")
        for line in lines:
            print(line, flush=True)


if __name__ == "__main__":
    main()
