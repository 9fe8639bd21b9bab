"""Windows and strips: the part that is asked for, cut without a rest."""

from itertools import pairwise
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.schedules.costs import Costs
from megatron.schedules.lower import lower
from megatron.schedules.make_plan import make_plan
from megatron.simulator.draw.stretches import (
    WHOLE,
    Stretch,
    Window,
    from_zero,
    shortest_pass,
    strips,
)
from megatron.simulator.simulate import Span, Timeline, simulate


@pytest.mark.parametrize(
    ("text", "window"),
    [
        ("1.5:3", Window(1.5, 3)),
        (":.5", Window(0, 0.5)),
        ("2e-3:", Window(0.002, inf)),
        (":", WHOLE),
        ("m8:m15", Window(8, 15, microbatches=True)),
        ("m8:m8", Window(8, 8, microbatches=True)),
        ("m8:m", Window(8, inf, microbatches=True)),
        ("m:m3", Window(0, 3, microbatches=True)),
    ],
)
def test_a_window_is_read_and_its_text_read_again(text: str, window: Window) -> None:
    assert Window.parse(text) == window
    assert Window.parse(str(window)) == window


@pytest.mark.parametrize("text", ["", "3", "3:1", "2:2", "m3:m1", "m3:4", "m1.5:m2", "-1:2", "a:b"])
def test_what_is_no_window_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="give FROM:TO"):
        Window.parse(text)


TIMELINE = simulate(lower(make_plan("1f1b", "vocab-2", 2, 8)))


@pytest.mark.parametrize(("weight", "scale"), [(0.5, 0.5), (0.3, 0.3), (0.1, 1.0), (1e-6, 1.0)])
def test_passes_that_take_next_to_nothing_do_not_stretch_a_drawing(
    weight: float, scale: float
) -> None:
    """As on a GPU that waits for its host, where W is a product that takes microseconds."""
    costs = Costs({"F": 1.0, "B": 2.0, "W": weight})
    timeline = simulate(lower(make_plan("zb-h1", "none", 2, 4, costs), costs), costs)
    assert shortest_pass([timeline]) == pytest.approx(scale)


def test_a_window_of_microbatches_reaches_from_their_first_pass_to_their_last() -> None:
    part = Window(2, 4, microbatches=True).stretch([TIMELINE])
    own = [s for s in TIMELINE.spans if s.kind in "FB" and 2 <= s.microbatch <= 4]
    assert part == (min(s.start for s in own), max(s.end for s in own))


def test_a_window_of_several_timelines_reaches_over_all_of_them() -> None:
    later = Timeline(2, tuple(s._replace(end=s.end + 3) for s in TIMELINE.spans))
    window = Window(2, 4, microbatches=True)
    one, both = window.stretch([TIMELINE]), window.stretch([TIMELINE, later])
    assert (both.begin, both.end) == (one.begin, one.end + 3)


def test_the_end_of_a_window_is_that_of_the_timeline_at_the_latest() -> None:
    assert Window(1, 1e9).stretch([TIMELINE]) == (1, TIMELINE.end)
    assert WHOLE.stretch([TIMELINE]) == (0, TIMELINE.end)


@pytest.mark.parametrize("window", [Window(1e6), Window(50, 60, microbatches=True)])
def test_a_window_without_anything_is_refused(window: Window) -> None:
    with pytest.raises(ValueError, match=r"nothing runs there: .* microbatches m0:m7"):
        window.stretch([TIMELINE])


@given(st.floats(0, 1e6), st.floats(1e-3, 1e6), st.floats(1e-2, 1e3))
def test_strips_cover_the_whole_and_are_as_few_as_their_length_allows(
    begin: float, length: float, longest: float
) -> None:
    whole = Stretch(begin, begin + length)
    longest = max(longest, whole.length / 50)
    cut = strips(whole, longest)
    assert (cut[0].begin, cut[-1].end) == whole
    assert all(a.end == b.begin for a, b in pairwise(cut))
    assert all(part.length <= longest * (1 + 1e-6) + 1e-6 for part in cut)
    assert (len(cut) - 1) * longest < whole.length


def test_time_counts_from_the_first_span_that_takes_time() -> None:
    times = ((3, 3), (5, 6), (6, 8))
    spans = tuple(Span(0, "compute", f"F{i}", "F", i, 0, *t) for i, t in enumerate(times))
    counted = from_zero(Timeline(1, spans)).spans
    assert [(span.start, span.end) for span in counted] == [(0, 1), (1, 3)]
