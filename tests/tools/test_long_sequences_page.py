"""tools/long_sequences_page.py: each row is the fastest setting that fits, and its losses."""

import json
from dataclasses import dataclass
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.long_sequences_page import summary, table, told
from tools.pages.tables import PAGE, replaced
from tools.predictions.kept import restored
from tools.predictions.long_sequences import (
    JOBS,
    LENGTHS,
    MEMORIES,
    PARTS,
    TREATMENTS,
    Cell,
    Layout,
    Row,
    fastest,
    settings,
)

JOB = JOBS[0]


def made(seconds: float, slices: int = 4) -> Cell:
    return Cell(Layout(8, 1, 1), slices, MEMORIES[0], seconds, 0.4, 61.0)


CELLS: dict[str, Cell | None] = {
    "anything": made(10.0),
    "slices": made(11.0, slices=1),
    "context parallelism": made(10.0),
    "recomputation": made(10.0),
    "the host": None,
}
ROW: Row = {"none": dict.fromkeys(CELLS), "vocab-2": CELLS}


def test_a_row_shows_the_fastest_and_what_it_takes_to_do_without_a_part() -> None:
    nothing, best = summary(JOB, "32k", ROW)
    assert nothing.startswith("| 8 H100 | 8B | 32k | none | nothing fits |")
    assert nothing.count("|") == best.count("|")
    assert best == (
        "| 8 H100 | 8B | 32k | vocab-2 | p = 8 | 4 | kept | 10.00 | 40.0% | 61.0 | +10.0% | "
        "not used | not used | does not fit |"
    )


def test_missing_rows_are_named() -> None:
    text = table({(JOB, "32k"): ROW})
    assert "Not predicted yet: 8k on 8 H100, 128k on 8 H100" in text
    assert "Not predicted" not in table({(job, name): ROW for job in JOBS for name in LENGTHS})


def test_a_row_that_was_kept_is_the_same_row() -> None:
    assert restored(Row, json.loads(json.dumps(ROW))) == ROW


def test_no_row_is_made_if_only_kept_ones_are_asked_for(tmp_path: Any) -> None:
    assert told(JOB, "32k", tmp_path, only_kept=True) is None


def test_a_batch_has_a_sample_for_every_replica_and_equally_many_tokens() -> None:
    for job in JOBS:
        for length in LENGTHS.values():
            for one in settings(job, length, "vocab-2")[::5]:
                batch = one.scenario.config.train.global_batch_size
                assert batch * length == job.tokens
                assert one.layout.pipeline * one.layout.context * one.layout.replicas == job.gpus
    assert {
        own.parallel.vocab_parallel
        for own in (settings(JOB, 1 << 13, name)[0].scenario.config for name in TREATMENTS)
    } == set(TREATMENTS)


@dataclass
class Bound:
    least_time: float


@dataclass
class Made:
    candidate: Bound
    cell: Cell | None


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5), st.booleans()), min_size=1, max_size=8)
)
def test_bounds_hide_nothing_that_is_faster(figures: list[tuple[int, int, bool]]) -> None:
    known = [Made(Bound(low), made(low + more) if fits else None) for low, more, fits in figures]
    known.sort(key=lambda one: one.candidate.least_time)
    found = fastest(cast("Any", known))
    times = [one.cell.seconds for one in known if one.cell is not None]
    assert (None if found is None else found.seconds) == min(times, default=None)


@pytest.mark.parametrize("tool", ["long_sequences_page.py", "splitting_page.py"])
def test_only_the_part_of_a_tool_is_replaced(tool: str) -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page.count(f"{tool}: begin") == page.count(f"{tool}: end") == 1
    changed = replaced(page, ["other"], tool)
    assert "\nother\n" in changed
    old = page.split(f"{tool}: begin -->\n")[1].split("\n<!-- ")[0]
    assert replaced(changed, [old], tool) == page


def test_parts_are_what_settings_do_without() -> None:
    known = settings(JOB, 1 << 15, "none")
    assert [sum(map(without, known)) for without in PARTS.values()] == [16, 8, 8, 8, 8]
