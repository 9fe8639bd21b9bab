"""What 1F1B promises with its vocabulary passes: activations in flight rank by rank, and time."""

import pytest
from harness.properties import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules import by_hand
from schedules.cases import BARRIERS, Case, cases, few_trials, random_costs, seeds

from megatron.schedules.check import check
from megatron.schedules.costs import UNIT_COSTS
from megatron.schedules.held import in_flight
from megatron.schedules.make_plan import make_plan
from megatron.schedules.plan import Plan

plans = cases(["1f1b"])
with_passes = cases(["1f1b"], st.sampled_from(["vocab-2", "vocab-1", "naive"]))


def span(plan: Plan) -> float:
    return by_hand.span(plan, UNIT_COSTS)


@settings(max_examples=examples(60))
@given(plans)
def test_activations_in_flight(case: Case) -> None:
    """Rank i holds p - i microbatches, and one more for each barrier; never more than there are."""
    p, m = case.ranks, case.microbatches
    assert in_flight(case.plan) == [min(m, p - rank + case.barriers) for rank in range(p)]


@settings(max_examples=examples(40))
@given(cases(["1f1b"], passes=60), seeds)
def test_costs_move_passes_within_the_promise(case: Case, seed: int) -> None:
    """A later rank may hold one microbatch more than in the block, and none more than rank 0."""
    p, m = case.ranks, case.microbatches
    with few_trials():
        costs = random_costs(seed, p)
        plan = make_plan("1f1b", case.vocabulary, p, m, costs, recompute_ahead=case.ahead)
    check(plan, [p + case.barriers - max(0, rank - 1) for rank in range(p)])
    assert [sorted(row) for row in plan.rows] == [sorted(row) for row in case.plan.rows]


@settings(max_examples=examples(40))
@given(with_passes)
def test_vocabulary_passes_are_in_order_on_every_rank(case: Case) -> None:
    chain = case.treatment.output_passes
    for rank, row in enumerate(case.plan.rows):
        at = {str(item): place for place, item in enumerate(row)}
        for i in range(case.microbatches):
            places = [at[f"{kind}{i}"] for kind in ("F", *chain)]
            assert places == sorted(places)
            assert at[f"IF{i}"] < at[f"IB{i}"]
            if rank == 0:
                assert at[f"IF{i}"] < at[f"F{i}"]
                assert at[f"B{i}"] < at[f"IB{i}"]
            if rank == case.ranks - 1:
                assert at[f"{case.treatment.barriers[-1].after}{i}"] < at[f"B{i}"]


@settings(max_examples=examples(40))
@given(st.integers(1, 10), st.integers(1, 24))
def test_1f1b_takes_the_time_of_the_textbook(p: int, m: int) -> None:
    """F = 1 and B = 2: m + p - 1 slots of 3 (arXiv 2104.04473, section 2.2)."""
    assert span(make_plan("1f1b", "none", p, m)) == 3 * (m + p - 1)


@pytest.mark.parametrize("vocabulary", ["vocab-2", "vocab-1", "naive"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_in_the_steady_state_nobody_idles(vocabulary: str, ranks: int) -> None:
    """A further microbatch takes its own work and no more; the bubble is not worse than 1F1B's."""
    times = [span(make_plan("1f1b", vocabulary, ranks, 3 * ranks + i)) for i in (0, 4)]
    plan = make_plan("1f1b", vocabulary, ranks, 1)
    work = sum(UNIT_COSTS.of_pass(plan, 0, item) for item in plan.rows[0])
    assert times[1] - times[0] <= 4 * work + 1e-6
    assert times[0] - 3 * ranks * work <= 3 * (ranks - 1) + 1e-6


@given(st.sampled_from([*BARRIERS]), st.integers(1, 6))
def test_one_rank_alone(vocabulary: str, microbatches: int) -> None:
    plan = make_plan("1f1b", vocabulary, 1, microbatches)
    work = sum(UNIT_COSTS.of_pass(plan, 0, item) for item in plan.rows[0])
    assert span(plan) == pytest.approx(work)
    order = [item.microbatch for item in plan.rows[0] if item.kind == "B"]
    assert order == [*range(microbatches)]
