"""The text drawing: a row per rank, time to the right, labels where they fit."""

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.schedules.costs import Costs
from megatron.schedules.lower import lower
from megatron.schedules.make_plan import make_plan
from megatron.simulator.draw.text import draw_text
from megatron.simulator.simulate import Span, Timeline, simulate


def test_a_drawing_by_hand() -> None:
    """18 units at 2 columns each, after 7 columns for the names."""
    timeline = simulate(lower(make_plan("1f1b", "none", 2, 2)), Costs({"F": 2, "B": 4}))
    assert timeline.end == 18
    assert draw_text(timeline, width=7 + 18 * 2).splitlines() == [
        "rank 0 F0-|F1-|........B0-----|....B1-----|",
        "rank 1 ....F0-|B0-----|F1-|B1-----|........",
    ]


@settings(max_examples=40)
@given(
    st.sampled_from(["none", "naive", "vocab-1", "vocab-2", "interlaced"]),
    st.integers(1, 12),
    st.integers(1, 12),
    st.integers(30, 200),
)
def test_one_row_a_rank_all_as_wide_as_asked_for(
    vocabulary: str, ranks: int, microbatches: int, width: int
) -> None:
    timeline = simulate(lower(make_plan("1f1b", vocabulary, ranks, microbatches)))
    rows = draw_text(timeline, width).splitlines()
    assert len(rows) == ranks
    assert {len(row) for row in rows} == {width}
    assert [row.split()[1] for row in rows] == [str(rank) for rank in range(ranks)]


def test_labels_are_cut_and_passes_shorter_than_a_column_left_out() -> None:
    times = [("F10", 0.0, 2.0), ("T10", 2.0, 2.2), ("B10", 5.0, 8.0), ("F11", 8.0, 12.0)]
    spans = tuple(Span(0, "compute", name, name[0], 10, 0, s, e) for name, s, e in times)
    assert draw_text(Timeline(1, spans), width=7 + 12) == "rank 0 F1...B10F11|"


def test_communications_are_not_drawn() -> None:
    spans = (
        Span(0, "comm", "X0 from 0", "X", 0, 0, 0.0, 4.0),
        Span(0, "compute", "F0", "F", 0, 0, 4.0, 8.0),
    )
    assert draw_text(Timeline(1, spans), width=7 + 8) == "rank 0 ....F0-|"


def test_nothing_happened() -> None:
    assert draw_text(Timeline(2, ()), width=10) == "rank 0 ...\nrank 1 ..."
