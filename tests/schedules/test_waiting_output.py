"""S that waits for the last stage's output: no plan is longer, and some are far shorter."""

from hypothesis import given
from hypothesis import strategies as st
from schedules import by_hand
from schedules.cases import blocks, random_costs, seeds

from megatron.schedules.blocks.block import Block, unroll
from megatron.schedules.blocks.one_f_one_b import one_f_one_b
from megatron.schedules.blocks.with_vocabulary import with_vocabulary
from megatron.schedules.check import check
from megatron.schedules.costs import Costs
from megatron.schedules.held import peak_held
from megatron.schedules.make_plan import make_plan
from megatron.schedules.plan import Plan
from megatron.schedules.timing import earliest
from megatron.schedules.treatments import TREATMENTS

VOCAB_2 = TREATMENTS["vocab-2"]
SHARES = (0.25, 0.5, 0.75)

LARGE = Costs(
    {"F": 57.0, "B": 85.0, "S": 1.1, "T": 0.9, "IF": 0.24, "IB": 0.76},
    {"X": 0.39, "G": 0.39, "C0": 0.84, "C1": 1.26, "CIF": 0.84, "CIB": 0.84},
)
"""Milliseconds of a large model with a small vocabulary: S is short beside F."""


def exponentials(plan: Plan) -> list[float]:
    """Return the microbatches of which every rank holds exponentials at a time."""
    return [peak_held(plan, row).exponentials for row in plan.rows]


@given(blocks(), st.sampled_from(SHARES), st.integers(1, 12), seeds)
def test_any_block_stays_a_plan_without_deadlock(
    block: Block, late: float, microbatches: int, seed: int
) -> None:
    plan = unroll(with_vocabulary(block, VOCAB_2, late), microbatches)
    check(plan)
    assert by_hand.end_times(plan, random_costs(seed, plan.ranks, plan.chunks))


@given(st.integers(2, 8), st.sampled_from(SHARES), st.integers(1, 24))
def test_no_more_exponentials_are_held_than_at_once(
    ranks: int, late: float, microbatches: int
) -> None:
    block = one_f_one_b(ranks)
    at_once, waiting = (
        unroll(with_vocabulary(block, VOCAB_2, share), microbatches) for share in (0.0, late)
    )
    assert max(exponentials(waiting)) <= max(exponentials(at_once))


@given(st.integers(2, 6), st.integers(1, 20), seeds)
def test_the_plan_is_never_longer_than_with_s_at_once(
    ranks: int, microbatches: int, seed: int
) -> None:
    costs = random_costs(seed, ranks)
    block = with_vocabulary(one_f_one_b(ranks), VOCAB_2)
    at_once = earliest(unroll(block, microbatches), costs).end
    plan = make_plan("1f1b", "vocab-2", ranks, microbatches, costs=costs)
    check(plan)
    assert earliest(plan, costs).end <= at_once * (1 + 1e-9)


def test_a_large_model_with_a_small_vocabulary_loses_little() -> None:
    """Of eight ranks and 32 microbatches the fill alone takes 7/32 of the work."""
    block = one_f_one_b(8)
    at_once = earliest(unroll(with_vocabulary(block, VOCAB_2), 32), LARGE).end
    plan = make_plan("1f1b", "vocab-2", 8, 32, costs=LARGE)
    work = 32 * (57 + 85 + 1.1 + 0.9 + 0.24 + 0.76)
    assert at_once / work - 1 > 1.9 * 7 / 32
    assert earliest(plan, LARGE).end / work - 1 < 7 / 32
