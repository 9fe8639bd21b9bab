"""The page of figures has every definition, and a headline says time and idle share first."""

from pathlib import Path

import pytest
from harness.properties import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.schedules.held import in_flight
from megatron.schedules.lower import lower
from megatron.schedules.make_plan import make_plan
from megatron.simulator.metrics import DEFINITIONS, definitions, headline
from megatron.simulator.simulate import simulate

PAGE = Path(__file__).resolve().parents[2] / "docs/metrics.md"


@pytest.mark.parametrize("name", DEFINITIONS)
def test_the_page_has_every_definition(name: str) -> None:
    assert definitions(name) in " ".join(PAGE.read_text().split()).replace(" * **", "\n* **")


def test_a_headline_by_hand() -> None:
    """1F1B with F = 1 and B = 2 on 2 ranks: 3 slots of 3, of which each rank idles in one."""
    plan = make_plan("1f1b", "none", 2, 2)
    timeline = simulate(lower(plan))
    expected = "time 9, idle 33.3%, 2 microbatches in flight"
    assert headline(timeline, in_flight(plan)) == expected


@settings(max_examples=examples(8), deadline=None)
@given(
    st.sampled_from(["1f1b", "zb-h1", "zb-h2", "v-half"]),
    st.sampled_from(["none", "vocab-2"]),
    st.integers(1, 5),
    st.integers(1, 6),
)
def test_the_bubble_of_the_papers_is_never_above_idle(
    schedule: str, vocabulary: str, ranks: int, microbatches: int
) -> None:
    timeline = simulate(lower(make_plan(schedule, vocabulary, ranks, microbatches)))
    assert -1e-9 <= timeline.bubble_rate() <= timeline.idle() + 1e-9
