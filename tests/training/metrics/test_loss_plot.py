"""The plot has its bars in proportion, and the history forgets no value."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.training.metrics.loss_plot import EIGHTHS, History, plot

LABEL = 12
LOSSES = st.lists(st.floats(0, 20), min_size=1, max_size=200)


def bars(rows: list[str]) -> list[int]:
    """The height of every column in eighths of a row."""
    columns = range(LABEL, len(rows[0]))
    return [sum(EIGHTHS.index(row[column]) for row in rows) for column in columns]


def test_a_plot_by_hand() -> None:
    """Of 16 eighths in two rows, 1 is the least: 15 steps for a difference of 15."""
    assert plot([16.0, 1.0, 4.0, 10.0], 20, 2) == ["         16 █  ▂", "          1 █▁▄█"]


@given(LOSSES, st.integers(20, 100), st.integers(2, 4))
def test_every_row_fits_and_higher_values_have_higher_bars(
    values: list[float], width: int, height: int
) -> None:
    rows = plot(values, width, height)
    assert len(rows) == height
    assert len({len(row) for row in rows}) == 1
    assert LABEL < len(rows[0]) <= width
    heights = bars(rows)
    assert min(heights) == 1
    if len(values) <= width - LABEL and max(values) > min(values):
        assert max(heights) == 8 * height
        ranked = sorted(zip(values, heights, strict=True))
        assert [bar for _, bar in ranked] == sorted(heights)


@given(LOSSES)
def test_the_history_has_the_mean_of_all_values_in_bounded_room(values: list[float]) -> None:
    history = History(room=8)
    for value in values:
        history.add(value)
    means = history.means
    assert len(means) <= 8
    assert min(values) - 1e-9 <= min(means)
    assert max(means) <= max(values) + 1e-9
    assert history.means == means
    if len(values) & (len(values) - 1) == 0:  # all means are of equally many values
        assert sum(means) / len(means) == pytest.approx(sum(values) / len(values))
