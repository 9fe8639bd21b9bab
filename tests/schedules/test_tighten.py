"""Tightening saves time, holds no more, and changes nothing where it saves none."""

from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st
from schedules import by_hand
from schedules.cases import RandomCosts, blocks, seeds, vocabularies

from megatron.schedules.block import Block, unroll
from megatron.schedules.check import check, peaks_held
from megatron.schedules.one_f_one_b import one_f_one_b
from megatron.schedules.passes import Pass
from megatron.schedules.plan import VOCABULARY_BARRIERS, Plan
from megatron.schedules.tighten import tighten
from megatron.schedules.vocabulary import with_vocabulary


def plan_of(block: Block, vocabulary: str, microbatches: int) -> Plan:
    barriers = VOCABULARY_BARRIERS[vocabulary]
    return unroll(block if barriers is None else with_vocabulary(block, barriers), microbatches)


any_plan = st.builds(plan_of, blocks(), vocabularies, st.integers(1, 6))


@given(any_plan, seeds)
def test_it_is_never_slower_and_still_a_plan(plan: Plan, seed: int) -> None:
    costs = RandomCosts(seed, plan.ranks)
    tightened = tighten(plan, costs)
    check(tightened)
    before, after = (by_hand.end_times(each, costs) for each in (plan, tightened))
    assert max(map(max, after)) < max(map(max, before)) or tightened == plan


@given(any_plan, seeds)
def test_it_holds_no_more(plan: Plan, seed: int) -> None:
    """Neither activations nor exponentials; embeddings are kept on the first stage only."""
    tightened = tighten(plan, RandomCosts(seed, plan.ranks))
    for rank in range(plan.ranks):
        before, after = peaks_held(plan, rank), peaks_held(tightened, rank)
        assert after[:2] <= before[:2]
        assert after[0] <= before[0]
        assert after[1] <= before[1]
        assert after[2] <= before[2] + (0 if rank == plan.stages[0][0] else plan.ranks)


@given(any_plan, seeds)
def test_passes_of_one_kind_and_chunk_keep_their_order(plan: Plan, seed: int) -> None:
    tightened = tighten(plan, RandomCosts(seed, plan.ranks))
    for before, after in zip(plan.rows, tightened.rows, strict=True):
        assert by_kind(before) == by_kind(after)


def by_kind(row: tuple[Pass, ...]) -> dict[tuple[str, int], list[int]]:
    found: dict[tuple[str, int], list[int]] = defaultdict(list)
    for item in row:
        found[item.kind, item.chunk].append(item.microbatch)
    return found


@settings(max_examples=30)
@given(st.integers(1, 8), st.integers(1, 20))
def test_1f1b_has_nothing_to_gain(ranks: int, microbatches: int) -> None:
    plan = unroll(one_f_one_b(ranks), microbatches)
    assert tighten(plan) is plan


def test_a_weight_gradient_fills_the_gap_before_the_next_backward() -> None:
    """Rank 0 would stand idle from B0 (3 to 4) to B1 (6 to 7): W0 fits in, 9 becomes 8."""
    slow = Plan.from_text(
        "microbatches 2\nstages 0.0 1.0\nbarriers none\n"
        "0: F0 F1 B0 B1 W0 W1\n"
        "1: F0 B0 W0 F1 B1 W1\n"
    )
    expected = slow.to_text().replace("B0 B1 W0 W1", "B0 W0 B1 W1")
    assert tighten(slow, lambda rank, item: 1.0).to_text() == expected


def test_a_forward_is_not_hoisted_beyond_the_memory_of_the_plan() -> None:
    """Rank 0 idles from 1 to 3; F1 would fit but for the second microbatch it would hold."""
    plan = Plan.from_text(
        "microbatches 2\nstages 0.0 1.0\nbarriers none\n0: F0 B0 F1 B1\n1: F0 B0 F1 B1\n"
    )
    assert tighten(plan, lambda rank, item: 1.0) is plan
