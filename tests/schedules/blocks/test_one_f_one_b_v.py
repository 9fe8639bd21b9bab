"""What 1F1B-V promises (arXiv 2405.15362): two thirds of the memory of 1F1B, at its bubble.

F = 1 and B = 2 a stage, communication free. ``PUBLISHED`` is what the pattern of the authors' own
scheduler holds and idles with m = 3 p, put through our simulator, before it moves passes ahead and
after (``v1f1b.py`` in megatron/core/pipeline_parallel/zerobubble/scheduler of
github.com/sail-sg/zero-bubble-pipeline-parallelism). Idle times are the same with m = 2 p and 4 p.
"""

from itertools import pairwise
from typing import Final

import pytest
from harness.marks import full
from harness.properties import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules import by_hand

from megatron.schedules.blocks.one_f_one_b_v import one_f_one_b_v
from megatron.schedules.costs import Costs
from megatron.schedules.held import in_flight
from megatron.schedules.make_plan import make_plan

PUBLISHED: Final = [
    # ranks, the most microbatches in flight, idle time in forwards of a stage
    (2, 2, 3.5), (3, 3, 7), (4, 3, 9), (5, 4, 12.5), (6, 5, 16), (7, 5, 18), (8, 6, 21.5),
    (12, 9, 34), (16, 11, 45),
]  # fmt: skip
MOVED_AHEAD: Final = {4: 7.5, 6: 11, 8: 16.5, 12: 26, 16: 37.5, 24: 56}
"""Ranks -> the idle time that is left when the scheduler has moved passes ahead."""


@pytest.mark.parametrize("groups", [2, full(4)])
@pytest.mark.parametrize(
    ("p", "idle"), [each if each[0] < 24 else full(*each) for each in MOVED_AHEAD.items()]
)
def test_its_plan_idles_no_longer_than_the_published_one(p: int, idle: float, groups: int) -> None:
    """Blocks leave gaps in the warm-up and the cool-down: a quarter of the idle time, and more."""
    m, costs = groups * p, Costs({"F": 1.0, "B": 2.0})
    plan = make_plan("1f1b-v", "none", p, m, costs)
    assert by_hand.span(plan, costs) / 2 - 3 * m <= idle + 1e-9
    assert max(in_flight(plan)) <= (2 * p + 3) / 3


@pytest.mark.parametrize(("p", "held", "idle"), PUBLISHED)
def test_its_block_holds_and_idles_as_much_as_the_published_pattern(
    p: int, held: int, idle: float
) -> None:
    plan = make_plan("1f1b-v", "none", p, 3 * p, shortened=False)
    assert max(in_flight(plan)) == held
    assert by_hand.span(plan, Costs({"F": 1.0, "B": 2.0})) / 2 - 9 * p == pytest.approx(idle)


@settings(max_examples=examples(40))
@given(st.integers(1, 48), st.integers(1, 4))
def test_it_holds_two_thirds_of_what_1f1b_holds(p: int, groups: int) -> None:
    """(2 p + 3) / 3 microbatches, rounded down: 2 / 3 for many ranks."""
    m = groups * p
    plan = make_plan("1f1b-v", "none", p, m, shortened=False)
    held = max(in_flight(plan))
    assert held <= min(m, (2 * p + 3) // 3)
    if groups > 1:
        assert held == (2 * p + 3) // 3


@settings(max_examples=examples(40))
@given(st.integers(1, 48))
def test_a_microbatch_lives_as_long_on_every_rank(p: int) -> None:
    """From F to B about 8 p units of its two chunks: 2 p / 3 microbatches, one every 6 units."""
    block = one_f_one_b_v(p)
    for row in block.rows:
        forwards = sum(slot.start for slot in row if slot.kind == "F")
        backwards = sum(slot.end for slot in row if slot.kind == "B")
        assert abs(backwards - forwards - 8 * p) <= 9


@settings(max_examples=examples(40))
@given(st.integers(1, 48))
def test_forwards_and_two_backwards_out_of_three_pass_at_once(p: int) -> None:
    block = one_f_one_b_v(p)
    stages = range(len(block.stages))
    forwards = [block.slot(stage, "F") for stage in stages]
    backwards = [block.slot(stage, "B") for stage in reversed(stages)]
    assert [later.start - first.end for first, later in pairwise(forwards)] == [0] * (2 * p - 1)
    waits = [later.start - first.end for first, later in pairwise(backwards)]
    assert {*waits} <= {0, 3}
    assert abs(waits.count(3) - len(waits) / 3) < 1


@settings(max_examples=examples(30))
@given(st.integers(1, 12), st.integers(1, 5))
def test_its_bubble_is_that_of_1f1b(p: int, groups: int) -> None:
    """Ranks idle for 3 (p - 1) forwards of a stage, and for one more where units do not fit."""
    m, costs = groups * p, Costs({"F": 1.0, "B": 2.0})
    plan = make_plan("1f1b-v", "none", p, m, shortened=False)
    assert by_hand.span(plan, costs) / 2 - 3 * m <= 3 * (p - 1) + 1
