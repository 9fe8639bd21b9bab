#!/usr/bin/env python3
"""Measure what planning costs at scale, and compare two measurements in a table.

python tools/plans_at_scale.py measure --csv after.csv
python tools/plans_at_scale.py measure --csv after.csv --ranks 8 16 32 64 --per-rank 16
python tools/plans_at_scale.py measure --csv after.csv --chunks 8 --schedules gis pipeoffload
python tools/plans_at_scale.py compare before.csv after.csv

``measure`` adds a line for every plan to the file, and skips those that it has already; so it may
be stopped and started again. Seconds are those of one core (``time.process_time``), so that other
processes lengthen the wait. They lengthen the figures too, where they share caches or a physical
core: ``unit`` says by how much, and ``compare`` shows seconds times the least unit over the own
one. To measure an older commit, copy this file into a checkout of it.

``even`` costs are F = B = W = 1 for a chunk and S = T = 0.25. ``uneven`` costs have F : B : W =
18 : 20 : 14, and communications that take time: blocks are made for the former, the latter need a
search. The bubble is that of the zero-bubble papers (arXiv 2401.10241, section 5.3).
"""

import csv
import heapq
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.flags.command import read_command
from megatron.flags.declare import flag, positional, required
from megatron.flags.ranges import COUNT
from megatron.schedules.catalogue import SCHEDULES, TRAITS
from megatron.schedules.costs import Costs
from megatron.schedules.make_plan import plan_for
from megatron.schedules.plan import Plan
from megatron.schedules.request import Request
from megatron.schedules.timing import earliest, longest_span

COSTS: Final[Mapping[str, Costs]] = {
    "even": Costs(
        {"F": 1.0, "B": 1.0, "W": 1.0, "S": 0.25, "E": 0.05, "T": 0.25, "IF": 0.0, "IB": 0.0}
    ),
    "uneven": Costs(
        {"F": 18.0, "B": 20.0, "W": 14.0, "S": 5.0, "E": 1.0, "T": 5.0, "IF": 0.5, "IB": 0.5},
        {"X": 0.5, "G": 0.5, "C0": 1.0, "C1": 1.0, "C2": 1.0, "C3": 1.0, "CIF": 1.0, "CIB": 1.0},
    ),
}
"""Times of one chunk's passes."""

COMPARED: Final = (*SCHEDULES, "auto")


class Case(NamedTuple):
    """A plan to make: the name of its costs, and fields of ``Request`` under the same names.

    Chunks of ``None`` are as few as the schedule needs.
    """

    costs: str
    schedule: str
    vocabulary: str
    ranks: int
    microbatches: int
    chunks: int | None = None

    @property
    def request(self) -> Request:
        """The request for the plan; ``auto`` takes the costs of all chunks of a rank together."""
        counts = self.ranks, self.microbatches
        costs = COSTS[self.costs]
        return Request(self.schedule, self.vocabulary, *counts, costs, chunks=self.chunks)

    @property
    def name(self) -> str:
        """The schedule, with its chunks if they are asked for."""
        return self.schedule if self.chunks is None else f"{self.schedule}, {self.chunks} chunks"


class Measured(NamedTuple):
    """The quality of a plan, and the time of planning.

    Attributes:
        bubble: share of the ranks' time in which they idle.
        seconds: CPU seconds that planning took.
        unit: CPU seconds of ``work_unit``, the mean of runs before and after planning; ``None``:
            the file is older than this column.
    """

    bubble: float
    seconds: float
    unit: float | None = None


def measure(case: Case) -> Measured:
    """Make the plan of ``case``; return its bubble and the time it took."""
    before = work_unit()
    begun = time.process_time()
    plan = plan_for(case.request)
    seconds = time.process_time() - begun
    costs = COSTS[case.costs]
    return Measured(
        bubble(plan, costs.per_chunk(plan.chunks) if case.request.traits.compares else costs),
        seconds,
        (before + work_unit()) / 2,
    )


def work_unit() -> float:
    """Return the CPU seconds of fixed work that resembles planning: a heap and long lists."""
    begun = time.process_time()
    numbers = [i * 7919 % 50_021 for i in range(50_000)]
    heap: list[tuple[int, int]] = []
    ends = [0.0] * 50_021
    for place, number in enumerate(numbers):
        heapq.heappush(heap, (number, place))
        ends[number] = ends[numbers[place - 1]] + 1.0
    while heap:
        heapq.heappop(heap)
    return time.process_time() - begun


def bubble(plan: Plan, costs: Costs) -> float:
    """Return 1 - work / span over all ranks of a checked plan."""
    timing = earliest(plan, costs)
    work = sum(
        end - start
        for starts, ends in zip(timing.starts, timing.ends, strict=True)
        for start, end in zip(starts, ends, strict=True)
    )
    return 1 - work / (plan.ranks * longest_span(timing.working))


def load(path: Path) -> dict[Case, Measured]:
    """Return the measurements of a file; a missing file has no measurements.

    Raises:
        ValueError: if the file holds no measurements.
    """
    found: dict[Case, Measured] = {}
    if not path.exists():
        return found
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            try:
                numbers = int(row["ranks"]), int(row["microbatches"])
                chunks = int(row["chunks"]) if row.get("chunks") else None
                case = Case(row["costs"], row["schedule"], row["vocabulary"], *numbers, chunks)
                unit = row.get("unit")
                found[case] = Measured(
                    float(row["bubble"]), float(row["seconds"]), float(unit) if unit else None
                )
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path} holds no measurements: {error!r}") from error
    return found


def add(path: Path, case: Case, measured: Measured) -> None:
    """Append a measurement to a file, which begins with the names of the columns.

    Raises:
        ValueError: if the file is older than the column of chunks, and the case names some.
    """
    columns = [*Case._fields, *Measured._fields]
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            columns = next(csv.reader(file))
    if case.chunks is not None and "chunks" not in columns:
        raise ValueError(f"--csv {path} has no column for chunks: add them to a new file")
    new = not path.exists()
    unit = "" if measured.unit is None else f"{measured.unit:.4f}"
    found = f"{measured.bubble:.6f}", f"{measured.seconds:.2f}", unit
    values = {**case._asdict(), **dict(zip(Measured._fields, found, strict=True))}
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        if new:
            writer.writeheader()
        writer.writerow(values)


def cases(options: "MeasureFlags") -> Iterator[Case]:
    """Yield the plans that the flags ask for, the small ones first."""
    for ranks in options.ranks:
        for vocabulary in options.vocab:
            for schedule in options.schedules:
                microbatches = options.per_rank * ranks
                chunks = options.chunks if TRAITS[schedule].takes_chunks else None
                yield Case(options.costs, schedule, vocabulary, ranks, microbatches, chunks)


def compare(before: Mapping[Case, Measured], after: Mapping[Case, Measured]) -> Iterator[str]:
    """Yield a table in Markdown for each kind of costs, treatment and share of microbatches.

    A row is a schedule, a column a number of ranks p. A cell says "bubble before → after, seconds
    before → after", with "?" for a missing measurement. Seconds are scaled as in ``_of_one_unit``.
    """
    before, after = _of_one_unit(before, after)
    every = list(dict.fromkeys([*after, *before]))
    for costs, vocabulary, per_rank in dict.fromkeys(map(_table, every)):
        own = [case for case in every if _table(case) == (costs, vocabulary, per_rank)]
        ranks = sorted({case.ranks for case in own})
        yield f"\n### {costs} costs, vocabulary {vocabulary}, m = {per_rank} p\n"
        yield "| schedule | " + " | ".join(f"p = {p}" for p in ranks) + " |"
        yield "|---|" + "---|" * len(ranks)
        for name in dict.fromkeys(case.name for case in own):
            row = {case.ranks: case for case in own if case.name == name}
            cells = [
                _cell(*(side.get(row[p]) if p in row else None for side in (before, after)))
                for p in ranks
            ]
            yield f"| {name} | " + " | ".join(cells) + " |"


def _of_one_unit(*files: Mapping[Case, Measured]) -> list[Mapping[Case, Measured]]:
    """Return the measurements with seconds scaled as if all had the smallest ``unit``."""
    units = [one.unit for found in files for one in found.values() if one.unit]
    least = min(units, default=0.0)
    return [
        {
            case: one._replace(seconds=one.seconds * least / one.unit) if one.unit else one
            for case, one in found.items()
        }
        for found in files
    ]


def _table(case: Case) -> tuple[str, str, int]:
    return case.costs, case.vocabulary, case.microbatches // case.ranks


def _cell(before: Measured | None, after: Measured | None) -> str:
    pair = (before, after)
    bubbles = " → ".join("?" if one is None else f"{one.bubble:.1%}" for one in pair)
    seconds = " → ".join("?" if one is None else f"{one.seconds:.1f}" for one in pair)
    return f"{bubbles}, {seconds} s"


@dataclass(frozen=True)
class MeasureFlags:
    """Make plans and write what they are like."""

    csv: Path = required("The file that lines are added to.")
    costs: str = flag("even", "Times of passes.", choices=tuple(COSTS))
    ranks: tuple[int, ...] = flag((8, 16, 32, 64, 128), "Pipeline ranks.", COUNT)
    per_rank: int = flag(4, "Microbatches for each rank, m / p.", COUNT)
    chunks: int | None = flag(
        None,
        "Chunks of a rank, where a schedule can have more.",
        COUNT,
        unset="as few as the schedule needs",
    )
    vocab: tuple[str, ...] = flag(("none", "vocab-2"), "Treatments of the vocabulary.")
    schedules: tuple[str, ...] = flag(COMPARED, "Schedules.", choices=tuple(TRAITS))


@dataclass(frozen=True)
class CompareFlags:
    """Print the tables of two files."""

    before: Path = positional("File of measurements.", "BEFORE")
    after: Path = positional("Another one.", "AFTER")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    options = read_command(argv, __doc__, {"measure": MeasureFlags, "compare": CompareFlags})
    if isinstance(options, CompareFlags):
        print("\n".join(compare(load(options.before), load(options.after))))
        return
    done = load(options.csv)
    for case in cases(options):
        if case not in done:
            measured = measure(case)
            add(options.csv, case, measured)
            print(*case, f"{measured.bubble:.2%}", f"{measured.seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main()
