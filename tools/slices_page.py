#!/usr/bin/env python3
"""Simulate what slices do to every schedule: tables of docs/long-sequences.md.

python tools/slices_page.py [--update]

All passes of a stage take one unit of time, or the times that a table names, and communication
takes none. Nothing is measured.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.flags.command import read
from megatron.flags.declare import flag
from megatron.schedules.catalogue import TRAITS
from megatron.schedules.costs import UNIT_COSTS, Costs
from megatron.schedules.request import Request
from megatron.simulator.scenario import Scenario, Simulation, run
from tools.pages import tables
from tools.pages.tables import row, table

TOOL: Final = "slices_page.py"
PAGE: Final = tables.PAGE.with_name("long-sequences.md")
SLICES: Final = (1, 2, 4, 8)
SCHEDULES: Final = tuple(name for name, traits in TRAITS.items() if "shortened" in traits.options)
"""All schedules that are a block: the others compare these, or search for a plan from nothing."""
WITH_VOCABULARY: Final = Costs(
    {"F": 1.0, "B": 2.0, "S": 0.225, "T": 0.225, "IF": 0.0, "IB": 0.0, "E": 0.0}
)
"""Eight ranks share the output layer; its three products take 1.2 each, as in images/README.md."""


def simulated(
    schedule: str, vocabulary: str, ranks: int, microbatches: int, slices: int, costs: Costs
) -> Simulation:
    """Return the simulation of a schedule whose microbatches have so many slices."""
    request = Request(schedule, vocabulary, ranks, microbatches, costs, slices=slices, quick=True)
    return run(Scenario(request))


def figures(found: Simulation) -> str:
    """Return the share of the time in which ranks idle, and the microbatches in flight."""
    return f"{found.timeline.idle():.1%}, {max(found.in_flight):.4g}"


def schedule_row(schedule: str) -> str:
    """Return the row of a schedule: p = 4, m = 8, without the vocabulary."""
    found = (simulated(schedule, "none", 4, 8, n, UNIT_COSTS) for n in SLICES)
    return row(f"`{schedule}`", *map(figures, found))


def treatment_row(treatment: str) -> str:
    """Return the row of a treatment of the vocabulary: 1F1B, p = 8, m = 24."""
    found = (simulated("1f1b", treatment, 8, 24, n, WITH_VOCABULARY) for n in SLICES)
    return row(treatment, *map(figures, found))


def lines() -> Iterator[str]:
    """Yield the lines of both tables."""
    head = [f"n = {n}" for n in SLICES]
    yield from (*table(("schedule", *head), ()), *map(schedule_row, SCHEDULES), "")
    yield from (*table(("treatment", *head), ()), *map(treatment_row, ("vocab-1", "vocab-2")))


@dataclass(frozen=True)
class PageFlags:
    """Tables."""

    update: bool = flag(False, "Write the tables into the page.")


def main() -> None:
    """Simulate all rows, and print or write the tables."""
    flags = read(None, __doc__, PageFlags)[PageFlags]
    tables.put(["\n".join(lines())], TOOL, update=flags.update, page=PAGE)


if __name__ == "__main__":
    main()
