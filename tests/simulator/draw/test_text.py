"""The text drawing: a row per rank, time to the right, whole labels, and a legend."""

import re

import pytest
from harness.properties import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.schedules.costs import Costs
from megatron.schedules.lower import lower
from megatron.schedules.make_plan import make_plan
from megatron.simulator.draw.stretches import Stretch, Window
from megatron.simulator.draw.text import draw_text
from megatron.simulator.simulate import Span, Timeline, simulate


def strips_of(drawing: str) -> list[tuple[Stretch, list[str]]]:
    """Return the times and the rows of every strip, without the names of the ranks."""
    found: list[tuple[Stretch, list[str]]] = []
    for line in drawing.splitlines():
        times = re.match(r"time (\S+) to (\S+) of ", line)
        if times:
            found.append((Stretch(float(times[1]), float(times[2])), []))
        elif re.match(r"rank +\d", line):
            found[-1][1].append(line)
    return found


def test_a_drawing_by_hand() -> None:
    """18 units at 2 columns each, after 7 columns for the names."""
    timeline = simulate(lower(make_plan("1f1b", "none", 2, 2)), Costs({"F": 2, "B": 4}))
    assert timeline.end == 18
    assert draw_text(timeline, width=7 + 18 * 2).splitlines() == [
        "time 0 to 18 of 18",
        "rank 0 F0-|F1-|........B0-----|....B1-----|",
        "rank 1 ....F0-|B0-----|F1-|B1-----|........",
        "F forward, B backward; F1 is F of",
        "microbatch 1; . is idle; a column is 0.5",
    ]


cases = {
    "schedule": st.sampled_from(["1f1b", "interleaved", "v-half"]),
    "vocabulary": st.sampled_from(["none", "naive", "vocab-1", "vocab-2", "interlaced"]),
    "ranks": st.integers(1, 6),
    "microbatches": st.integers(1, 8),
    "width": st.integers(30, 200),
}


@settings(max_examples=examples(15), deadline=None)
@given(**cases)
def test_every_strip_has_a_row_a_rank_all_as_wide_as_asked_for(
    schedule: str, vocabulary: str, ranks: int, microbatches: int, width: int
) -> None:
    timeline = simulate(lower(make_plan(schedule, vocabulary, ranks, microbatches)))
    drawing = draw_text(timeline, width)
    strips = strips_of(drawing)
    for _, rows in strips:
        assert {len(row) for row in rows} == {width}
        assert [row.split()[1] for row in rows] == [str(rank) for rank in range(ranks)]
    assert strips[0][0].begin == 0
    assert strips[-1][0].end == pytest.approx(timeline.end, rel=1e-3)
    assert max(map(len, drawing.splitlines())) == width


@settings(max_examples=examples(15), deadline=None)
@given(**cases)
def test_a_label_is_whole_and_stands_where_its_pass_runs(
    schedule: str, vocabulary: str, ranks: int, microbatches: int, width: int
) -> None:
    timeline = simulate(lower(make_plan(schedule, vocabulary, ranks, microbatches)))
    left = len(f"rank {ranks - 1} ")
    for part, rows in strips_of(draw_text(timeline, width)):
        column = part.length / (width - left)
        for rank, row in enumerate(rows):
            for token in re.finditer(r"(IF|IB|[FBWSET])\d+(\.\d+)?", row[left:]):
                begin, end = (part.begin + at * column for at in token.span())
                shown = Stretch(begin - column, end + column)
                running = filter(shown.shows, timeline.compute(rank))
                assert token[0] in {span.label for span in running}


@pytest.mark.parametrize(("schedule", "microbatches"), [("1f1b", 120), ("v-half", 12)])
def test_all_passes_of_model_chunks_have_their_label_unless_a_strip_ends_in_them(
    schedule: str, microbatches: int
) -> None:
    timeline = simulate(lower(make_plan(schedule, "vocab-2", 2, microbatches)))
    strips = strips_of(draw_text(timeline, 120))
    ends = [part.end for part, _ in strips]
    for rank in range(2):
        row = " ".join(rows[rank] for _, rows in strips)
        drawn = set(re.findall(r"[FBW][0-9]+(?:\.1)?", row))
        whole = [s for s in timeline.compute(rank) if s.kind in "FBW"]
        assert len(strips) > 1
        assert {
            s.label for s in whole if not any(s.start - 0.01 < end < s.end + 0.01 for end in ends)
        } <= drawn


def on_one_rank(*passes: tuple[str, float, float]) -> Timeline:
    return Timeline(1, tuple(Span(0, "compute", n, n[0], 10, 0, s, e) for n, s, e in passes))


def test_what_has_no_room_has_its_kind_or_a_mark_and_the_legend_says_so() -> None:
    """4 columns a forward and 1 a T; the name IF has two letters."""
    spans = [("F10", 0.0, 4.0), ("T10", 4.0, 5.0), ("F11", 6.0, 10.0), ("T11", 10.0, 10.2)]
    drawing = draw_text(on_one_rank(*spans), width=7 + 11).splitlines()
    assert drawing[1] == "rank 0 F10|T.F11-|"
    legend = " ".join(drawing[2:])
    assert "a kind alone has no room" in legend
    assert "shorter than a column" in legend
    assert "+" not in legend
    short = Span(0, "compute", "IF0", "IF", 0, 0, 4.0, 5.0)
    drawing = draw_text(
        Timeline(1, (*on_one_rank(spans[0], spans[2]).spans, short)), width=17
    ).splitlines()
    assert drawing[1] == "rank 0 F10|+.F11|"
    assert "+ has no room" in " ".join(drawing[2:])


def test_the_legend_names_the_kinds_that_are_drawn_and_no_other() -> None:
    *_, legend = draw_text(on_one_rank(("F10", 0, 4), ("B10", 4, 8)), width=200).splitlines()
    assert legend.startswith("F forward, B backward; F10 is F of microbatch 10; . is idle; ")


def test_the_legend_explains_the_chunk() -> None:
    timeline = simulate(lower(make_plan("interleaved", "none", 2, 2)))
    assert "F1.1 is F of microbatch 1 in chunk 1 of its rank" in draw_text(timeline, 300)


def test_communications_are_not_drawn() -> None:
    spans = (
        Span(0, "comm", "X0 from 0", "X", 0, 0, 0.0, 4.0),
        Span(0, "compute", "F0", "F", 0, 0, 4.0, 8.0),
    )
    assert draw_text(Timeline(1, spans), width=7 + 8).splitlines()[1] == "rank 0 ....F0-|"


def test_a_window_shows_what_the_whole_shows_there() -> None:
    timeline = simulate(lower(make_plan("1f1b", "none", 2, 8)), Costs({"F": 2, "B": 4}))
    whole = draw_text(timeline, 7 + 2 * int(timeline.end)).splitlines()
    part = draw_text(timeline, 7 + 2 * 20, window=Window(10, 30)).splitlines()
    assert part[0] == f"time 10 to 30 of {timeline.end:g}"
    for row, piece in zip(whole[1:3], part[1:3], strict=True):
        begin = re.match(r"[^|.]*", piece[7:])  # the pass that the window cuts
        assert begin is not None
        assert piece[7 + begin.end() : -8] == row[7 + 20 + begin.end() : 7 + 60 - 8]


def test_no_more_strips_than_asked_for() -> None:
    timeline = simulate(lower(make_plan("1f1b", "none", 2, 40)))
    every, two = (strips_of(draw_text(timeline, most=most)) for most in (None, 2))
    assert len(every) > 2
    assert two == every[:2]


def test_nothing_happened() -> None:
    with pytest.raises(ValueError, match="nothing runs there"):
        draw_text(Timeline(2, ()), width=10)
