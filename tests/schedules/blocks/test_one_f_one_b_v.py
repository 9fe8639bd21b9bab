"""What 1F1B-V promises (arXiv 2405.15362): two thirds of the memory of 1F1B, at its bubble.

F = 1 and B = 2 a stage, communication free.
"""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from schedules import by_hand

from megatron.schedules.blocks.one_f_one_b_v import one_f_one_b_v
from megatron.schedules.costs import Costs
from megatron.schedules.held import in_flight
from megatron.schedules.make_plan import make_plan


@settings(max_examples=40)
@given(st.integers(1, 48), st.integers(1, 4))
def test_it_holds_two_thirds_of_what_1f1b_holds(p: int, groups: int) -> None:
    """2 p / 3 microbatches, and one more at most for what is in hand: 2 / 3 for many ranks."""
    m = groups * p
    plan = make_plan("1f1b-v", "none", p, m, shortened=False)
    held = max(in_flight(plan))
    assert held <= min(m, 2 * p / 3 + 1)
    if groups > 1:
        assert held > 2 * p / 3 - 1


@settings(max_examples=40)
@given(st.integers(1, 48))
def test_a_microbatch_lives_as_long_on_every_rank(p: int) -> None:
    """From F to B about 8 p units of its two chunks: 2 p / 3 microbatches, one every 6 units."""
    block = one_f_one_b_v(p)
    for row in block.rows:
        forwards = sum(slot.start for slot in row if slot.kind == "F")
        backwards = sum(slot.end for slot in row if slot.kind == "B")
        assert abs(backwards - forwards - 8 * p) <= 9


@settings(max_examples=40)
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


@settings(max_examples=30)
@given(st.integers(1, 12), st.integers(1, 5))
def test_its_bubble_is_that_of_1f1b(p: int, groups: int) -> None:
    """Ranks idle for 3 (p - 1) forwards of a stage, and for one more where units do not fit."""
    m, costs = groups * p, Costs({"F": 1.0, "B": 2.0})
    plan = make_plan("1f1b-v", "none", p, m, shortened=False)
    assert by_hand.span(plan, costs) / 2 - 3 * m <= 3 * (p - 1) + 1
