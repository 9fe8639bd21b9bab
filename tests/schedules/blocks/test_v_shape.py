"""What the V shapes promise, and the bubbles of their authors' own schedulers.

Memory: huggingface.co/spaces/sail/pipeline-parallelism-with-controllable-memory, description1.md.
Bubbles: the plans of github.com/sail-sg/zero-bubble-pipeline-parallelism (``zbv_greedy.py`` and
``zbv.py`` in megatron/core/pipeline_parallel/zerobubble/scheduler), put through our simulator with
free communication and m = 3 p. F : B : W is 1 : 1 : 1 and 18 : 20 : 14.
"""

from typing import Final

import pytest
from harness.properties import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.schedules.costs import Costs
from megatron.schedules.held import in_flight
from megatron.schedules.lower import lower
from megatron.schedules.make_plan import make_plan
from megatron.schedules.plan import Plan
from megatron.simulator.simulate import simulate

EQUAL: Final = Costs({"F": 1.0, "B": 1.0, "W": 1.0})
UNEQUAL: Final = Costs({"F": 18.0, "B": 20.0, "W": 14.0})
PUBLISHED: Final = {
    # schedule: ranks -> bubbles with equal and unequal times, in percent
    "v-min": {4: (13.25, 23.81), 8: (15.79, 26.07), 16: (17.00, 27.34), 32: (17.60, 27.86)},
    "v-half": {4: (6.49, 9.30), 8: (10.56, 13.33), 16: (12.46, 15.25), 32: (13.38, 16.24)},
    "zb-v": {4: (0.00, 1.89), 8: (0.00, 2.73), 16: (0.00, 3.29), 32: (0.00, 3.50)},
}
HELD: Final = {
    "v-min": lambda p: (p + 4) // 3,
    "v-half": lambda p: (p + 2) // 2,
    "zb-v": lambda p: p,
}
CASES: Final = [
    pytest.param(name, p, *bubbles, marks=[] if p == 4 else pytest.mark.full)
    for name, by_ranks in PUBLISHED.items()
    for p, bubbles in by_ranks.items()
]


def bubble(plan: Plan, costs: Costs) -> float:
    return 100 * simulate(lower(plan, costs), costs).bubble_rate()


@pytest.mark.parametrize("schedule", HELD)
@settings(max_examples=examples(30))
@given(st.integers(1, 40), st.integers(1, 80))
def test_a_block_holds_what_is_published(schedule: str, p: int, m: int) -> None:
    held = max(in_flight(make_plan(schedule, "none", p, m, shortened=False)))
    assert held <= min(m, HELD[schedule](p))
    if m >= 2 * p:
        assert held == HELD[schedule](p)


@pytest.mark.parametrize(("schedule", "p", "equal", "unequal"), CASES)
def test_it_idles_no_more_than_what_its_authors_schedule_and_holds_as_much(
    schedule: str, p: int, equal: float, unequal: float
) -> None:
    for costs, published in ((EQUAL, equal), (UNEQUAL, unequal)):
        plan = make_plan(schedule, "none", p, 3 * p, costs)
        assert round(bubble(plan, costs), 2) <= published
        assert max(in_flight(plan)) <= HELD[schedule](p)


@pytest.mark.parametrize(("p", "limit", "less"), [(4, 3, 2.0), pytest.param(8, 4.5, 1.1)])
def test_v_min_buys_a_smaller_bubble_with_memory(p: int, limit: float, less: float) -> None:
    """Half a microbatch more, or one, takes it below the published bubble by this factor."""
    plan = make_plan("v-min", "none", p, 3 * p, EQUAL, memory_limit=limit)
    assert max(in_flight(plan)) == limit
    assert bubble(plan, EQUAL) <= PUBLISHED["v-min"][p][0] / less
