"""Bubbles of the zero-bubble papers' tables, from their profiled pass times.

arXiv 2401.10241, table 5 (profiled times in table 9) and table 8. The times of table 8 are those of
one of two chunks of a rank. Published rates are rounded to four digits.
"""

import csv
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from megatron.schedules.costs import Costs
from megatron.schedules.lower import lower
from megatron.schedules.make_plan import make_plan
from megatron.simulator.simulate import simulate

DATA: Final = Path(__file__).resolve().parents[2] / "docs/reference"
QUICK: Final = {"1F1B": 2000, "1F1B-I": 500, "ZB-V": 500}
QUICK_OTHERS: Final = 200
"""Ranks x microbatches up to which a schedule is checked every time."""
INTERLEAVED_CHUNKS: Final = {"1.5B": 3, "6.2B": 4, "14.6B": 3, "28.3B": 2}
"""Chunks of 1F1B-I in table 5: each transformer layer is one (section 5.1), so
there are as many as a stage has layers. In table 8 there are two, as ZB-V has."""


class Row(NamedTuple):
    """A model on a pipeline, its pass times (of all chunks of a rank, in us), published bubbles."""

    table: int
    model: str
    ranks: int
    microbatches: int
    times: tuple[float, float, float]
    p2p: float
    published: dict[str, float]

    def __str__(self) -> str:
        return f"table{self.table}-{self.model}-p{self.ranks}-m{self.microbatches}"


def read(table: int) -> list[Row]:
    unit, prefix = (1, "") if table == 5 else (2, "chunk_")
    rows = []
    with (DATA / f"zero_bubble_table{table}.csv").open(newline="") as file:
        for line in csv.DictReader(file):
            names = [name for name in line if name[:2] in ("1F", "ZB")]
            forward, backward, weight = (unit * float(line[f"{prefix}{k}_us"]) for k in "FBW")
            rows.append(
                Row(
                    table,
                    line["model"],
                    int(line["p"]),
                    int(line["m"]),
                    (forward, backward, weight),
                    float(line["p2p_us"]),
                    {name: float(line[name]) for name in names},
                )
            )
    return rows


def chunks_of(row: Row, name: str) -> int:
    if name == "1F1B-I":
        return INTERLEAVED_CHUNKS[row.model] if row.table == 5 else 2
    return 2 if name == "ZB-V" else 1


@cache
def bubble(row_name: str, name: str, shortened: bool = True) -> float:
    """Return what is simulated for a row."""
    row = ROWS[row_name]
    chunks = chunks_of(row, name)
    forward, backward, weight = (time / chunks for time in row.times)
    costs = Costs({"F": forward, "B": backward, "W": weight}, {"X": row.p2p, "G": row.p2p})
    schedule = "interleaved" if name == "1F1B-I" else name.lower()
    plan = make_plan(
        schedule,
        "none",
        row.ranks,
        row.microbatches,
        costs,
        chunks=chunks if name == "1F1B-I" else None,
        shortened=shortened,
    )
    return simulate(lower(plan, costs), costs).bubble_rate()


ROWS: Final = {str(row): row for table in (5, 8) for row in read(table)}
CELLS: Final = [
    pytest.param(
        *(name, schedule, rate),
        id=f"{name}-{schedule}",
        marks=(
            []
            if row.ranks * row.microbatches <= QUICK.get(schedule, QUICK_OTHERS)
            else pytest.mark.full
        ),
    )
    for name, row in ROWS.items()
    for schedule, rate in row.published.items()
]


def cells(*schedules: str) -> pytest.MarkDecorator:
    chosen = [cell for cell in CELLS if cell.values[1] in schedules]
    return pytest.mark.parametrize(("row", "schedule", "published"), chosen)


def test_the_tables_are_whole() -> None:
    assert [sum(row.table == table for row in ROWS.values()) for table in (5, 8)] == [12, 9]
    assert all(len(row.published) == (6 if row.table == 5 else 5) for row in ROWS.values())


@cells("1F1B", "ZB-H1", "ZB-H2")
def test_schedules_with_a_block_are_within_0_0005(
    row: str, schedule: str, published: float
) -> None:
    assert bubble(row, schedule) == pytest.approx(published, abs=0.0005)


@cells("ZB-1p")
def test_zb_1p_is_within_0_002(row: str, schedule: str, published: float) -> None:
    assert bubble(row, schedule) == pytest.approx(published, abs=0.002)


@cells("1F1B-I", "ZB-V", "ZB-2p")
def test_heuristics_are_at_most_0_002_above(row: str, schedule: str, published: float) -> None:
    assert bubble(row, schedule) <= published + 0.002


@cells("1F1B-I")
def test_1f1b_i_is_published_with_one_round_of_messages_less(
    row: str, schedule: str, published: float
) -> None:
    """In Megatron's order a microbatch shows all its 2 (v p - 1) messages, in every row p more.

    Shortened, later ranks hold a chunk more, and between none and two such rounds are hidden.
    """
    ranks, hop = ROWS[row].ranks, ROWS[row].p2p
    work = ROWS[row].microbatches * sum(ROWS[row].times)
    span = work / (1 - bubble(row, schedule, shortened=False))
    assert 1 - work / (span - ranks * hop) == pytest.approx(published, abs=0.0002)
