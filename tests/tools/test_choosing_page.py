"""docs/choosing-a-schedule.md is current; its front is one, and its advice follows from it."""

import xml.etree.ElementTree as ElementTree
from itertools import product
from pathlib import Path

import pytest
from harness.marks import full
from hypothesis import given
from hypothesis import strategies as st

from megatron.schedules.catalogue import SCHEDULES
from tools import choosing_page
from tools.choosing_page import (
    INTRODUCTION,
    PAGE,
    SIZES,
    SPLITTING,
    TREATMENTS,
    Choice,
    advice,
    chart,
    choices,
    front,
    picture_of,
    section,
    write,
)


def choice(name: str, seconds: float, memory: float, treatment: str = "vocab-2") -> Choice:
    return Choice(name, treatment, seconds, 0.5, 0.1, memory)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=30))
def test_every_choice_is_on_the_front_or_beaten_by_one_that_is(
    figures: list[tuple[int, int]],
) -> None:
    found = [choice(str(n), seconds, memory) for n, (seconds, memory) in enumerate(figures)]
    best = front(found)
    for one in found:
        beaten = any(
            other.seconds <= one.seconds
            and other.memory <= one.memory
            and (other.seconds, other.memory) != (one.seconds, one.memory)
            for other in best
        )
        assert beaten != (one in best)


def test_the_advice_follows_from_the_figures() -> None:
    found = [
        choice("fast", 1.0, 60),
        choice("thrifty", 1.03, 50),
        choice("small", 1.2, 30),
        choice("layers", 1.25, 70, "redis"),
        choice("whole", 1.5, 80, "none"),
    ]
    assert advice(found) == (
        "Take vocab-2 with `thrifty` (1.030 s, 50.0 GiB): it ties with the fastest, `fast` (1.000 "
        "s, 60.0 GiB), and takes 10.0 GiB less. `small` (1.200 s, 30.0 GiB) takes the least "
        "memory, and 20% more time than the fastest. With the vocabulary on the first and the last "
        "stage, `whole` (1.500 s, 80.0 GiB) is best: 50% slower than the fastest. With layers "
        "moved away from these stages (redis), `layers` (1.250 s, 70.0 GiB) is best: 25% slower "
        "than the fastest."
    )
    assert "and none that ties takes less memory" in advice([found[0], *found[3:]])


def test_a_redis_that_moves_no_layer_is_not_called_best() -> None:
    found = [choice("fast", 1.0, 60), choice("a", 1.5, 80, "none"), choice("a", 1.5, 80, "redis")]
    assert advice(found).endswith(
        "`a` (1.500 s, 80.0 GiB) is best: 50% slower than the fastest. `redis` moves no layer "
        "here, so its rows are those of `none`."
    )
    moved = [*found[:2], choice("a", 1.4, 80, "redis")]
    assert "moved away from these stages (redis), `a` (1.400 s" in advice(moved)


def test_differences_in_the_advice_are_those_of_the_figures_beside_them() -> None:
    """The differences of the figures before rounding would be shown as 3.7 GiB and 41%."""
    found = [
        choice("fast", 0.8296, 28.44),
        choice("thrifty", 0.8464, 24.76),
        choice("layers", 0.9441, 30, "redis"),
        choice("whole", 1.16637, 30, "none"),
    ]
    said = advice(found)
    assert "(0.846 s, 24.8 GiB)" in said
    assert "(0.830 s, 28.4 GiB), and takes 3.6 GiB less" in said
    assert "`whole` (1.166 s, 30.0 GiB) is best: 40% slower" in said


def test_what_differs_by_less_than_predictions_err_is_a_tie() -> None:
    found = [choice("fast", 1.0, 60), choice("whole", 1.033, 80, "none")]
    found += [choice("layers", 1.034, 70, "redis")]
    said = advice(found)
    assert "`whole` (1.033 s, 80.0 GiB) is best: a tie with the fastest. With layers" in said
    assert "`layers` (1.034 s, 70.0 GiB) is best: 3% slower than the fastest." in said
    rows = [line for line in section("1k", found) if line.startswith("|")][2:]
    assert [row.split("|")[1].strip() for row in rows] == ["●≈", "≈", ""]


def test_a_chart_has_a_dot_for_every_choice_and_a_name_for_the_front() -> None:
    found = [choice("fast", 1.0, 60), choice("small", 2.0, 30), choice("worse", 2.0, 70, "none")]
    drawn = ElementTree.fromstring(chart("1k", found))
    notes = [note.text for note in drawn.findall(".//{*}title")]
    assert notes == [
        f"{c.schedule}, {c.treatment}: {c.seconds:.3f} s, {c.memory:.1f} GiB" for c in found
    ]
    texts = {text.text for text in drawn.findall(".//{*}text")}
    assert {"fast", "small", *TREATMENTS} < texts
    assert "worse" not in texts


def test_the_page_has_the_introduction_and_every_vocabulary() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.startswith(INTRODUCTION)
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        *(f"## V = {name}" for name in SIZES),
        SPLITTING,
        "## Long samples",
        "## Hiding the waits for tensor ranks",
    ]


QUICK = {"1f1b", "interleaved"}
NAMES = sorted(SCHEDULES)
LARGEST = "256k"


@pytest.mark.parametrize(
    ("name", "schedules"),
    [(LARGEST, QUICK), full("32k", QUICK | {*NAMES[::2]}), full("128k", QUICK | {*NAMES[1::2]})],
    ids=[LARGEST, "32k", "128k"],
)
def test_rows_of_the_page_are_current(name: str, schedules: set[str]) -> None:
    """Of schedules that are quickly planned, and with ``full`` of every schedule at some size.

    Else: python tools/choosing_page.py.
    """
    text = PAGE.read_text(encoding="utf-8").partition(f"## V = {name}\n")[2].partition("\n## ")[0]
    found = choices(SIZES[name], schedules)
    assert {(one.schedule, one.treatment) for one in found} >= {*product(QUICK, TREATMENTS)}
    assert all(one.row in text for one in found)


@pytest.mark.full
def test_the_section_of_the_largest_vocabulary_is_current() -> None:
    """Its advice and its picture too. Else: python tools/choosing_page.py."""
    found = choices(SIZES[LARGEST])
    assert "\n".join(section(LARGEST, found)) in PAGE.read_text(encoding="utf-8")
    assert picture_of(LARGEST).read_text(encoding="utf-8") == chart(LARGEST, found)


def test_all_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [choice("fast", 1.0, 60), choice("whole", 2.0, 30, "none"), choice("x", 2, 70, "redis")]
    monkeypatch.setattr(choosing_page, "choices", lambda size: found)
    for folder in ("docs", "images"):
        (tmp_path / folder).mkdir()
    kept = f"{SPLITTING}\n\nSentences and tables.\n"
    (tmp_path / "docs" / PAGE.name).write_text(f"Old.\n{kept}", encoding="utf-8")
    write(tmp_path)
    assert len(list((tmp_path / "images").iterdir())) == len(SIZES)
    page = (tmp_path / "docs" / PAGE.name).read_text(encoding="utf-8")
    assert "| ●≈ | `fast` | vocab-2 | 1.000 | 50.0% | 10.0% | 60.0 |" in page
    assert page.startswith(INTRODUCTION)
    assert page.endswith(kept)
