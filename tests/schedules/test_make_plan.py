"""What every plan of 1F1B promises: completeness, no deadlock, activations in flight, time."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules import by_hand
from schedules.cases import BARRIERS, Case, RandomCosts, cases, seeds, vocabularies

from megatron.schedules.check import check, in_flight
from megatron.schedules.passes import Pass
from megatron.schedules.plan import Plan
from megatron.schedules.registry import make_plan
from megatron.schedules.timing import UNIT_COSTS, unit_cost

GOLDEN = Path(__file__).parent / "golden"


def makespan(plan: Plan) -> float:
    return max(row[-1] for row in by_hand.end_times(plan, unit_cost))


@settings(max_examples=40)
@given(cases())
def test_every_pass_exactly_once(case: Case) -> None:
    kinds = ["F", "B"] if case.vocabulary == "none" else ["F", "B", "S", "T", "IF", "IB"]
    everything = sorted(f"{kind}{i}" for kind in kinds for i in range(case.microbatches))
    for row in case.plan.rows:
        assert sorted(map(str, row)) == everything


@settings(max_examples=40)
@given(cases(), seeds)
def test_nothing_deadlocks(case: Case, seed: int) -> None:
    """The edges of the plan, written out by hand, have no cycle; the last pass has an end."""
    ends = by_hand.end_times(case.plan, RandomCosts(seed, case.ranks))
    assert all(len(row) == len(set(row)) > 0 for row in ends)


@settings(max_examples=60)
@given(cases())
def test_activations_in_flight(case: Case) -> None:
    """Rank i holds p - i microbatches, and one more for each barrier; never more than there are."""
    _, p, m = case
    extra = BARRIERS[case.vocabulary]
    assert in_flight(case.plan) == [min(m, p - rank + extra) for rank in range(p)]


@settings(max_examples=40)
@given(cases(ranks=8), seeds)
def test_costs_move_passes_within_the_promise(case: Case, seed: int) -> None:
    vocabulary, p, m = case
    plan = make_plan("1f1b", vocabulary, p, m, RandomCosts(seed, p))
    extra = BARRIERS[vocabulary]
    check(plan, in_flight_limit=[p - rank + extra for rank in range(p)])
    assert by_hand.end_times(plan, unit_cost)
    assert [sorted(row) for row in plan.rows] == [sorted(row) for row in case.plan.rows]


@settings(max_examples=40)
@given(cases(vocabulary=st.sampled_from(["vocab-1", "vocab-2"])))
def test_vocabulary_passes_are_in_order_on_every_rank(case: Case) -> None:
    p, m = case.ranks, case.microbatches
    for rank, row in enumerate(case.plan.rows):
        at = {str(item): place for place, item in enumerate(row)}
        for i in range(m):
            assert at[f"F{i}"] < at[f"S{i}"] < at[f"T{i}"]
            assert at[f"IF{i}"] < at[f"IB{i}"]
        if rank == 0:
            assert all(at[f"IF{i}"] < at[f"F{i}"] and at[f"B{i}"] < at[f"IB{i}"] for i in range(m))
        if rank == p - 1:
            before_b = "T" if case.vocabulary == "vocab-1" else "S"
            assert all(at[f"{before_b}{i}"] < at[f"B{i}"] for i in range(m))


@settings(max_examples=40)
@given(cases(vocabulary=st.just("none")))
def test_without_vocabulary_it_is_the_1f1b_of_megatron(case: Case) -> None:
    for rank, row in enumerate(case.plan.rows):
        expected = by_hand.one_f_one_b_row(case.ranks, rank, case.microbatches)
        assert list(map(str, row)) == expected


@settings(max_examples=40)
@given(cases(vocabulary=st.just("none")))
def test_1f1b_takes_the_time_of_the_textbook(case: Case) -> None:
    """F = 1 and B = 2: m + p - 1 slots of 3 (arXiv 2104.04473, section 2.2)."""
    assert makespan(case.plan) == 3 * (case.microbatches + case.ranks - 1)


@pytest.mark.parametrize("vocabulary", ["vocab-1", "vocab-2"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_in_the_steady_state_nobody_idles(vocabulary: str, ranks: int) -> None:
    """A further microbatch takes its own work and no more; the bubble is not worse than 1F1B's."""
    times = [makespan(make_plan("1f1b", vocabulary, ranks, 3 * ranks + i)) for i in (0, 1, 2)]
    work = sum(UNIT_COSTS[kind] for kind in ("F", "B", "S", "T", "IF", "IB"))
    assert times[1] - times[0] == pytest.approx(work)
    assert times[2] - times[1] == pytest.approx(work)
    assert times[0] - 3 * ranks * work <= 3 * (ranks - 1) + 1e-6


@pytest.mark.parametrize("vocabulary", ["none", "vocab-1", "vocab-2"])
def test_golden_plan_of_four_ranks_and_eight_microbatches(vocabulary: str) -> None:
    """Looked over by eye when made; a change of any pass should be looked over again."""
    golden = (GOLDEN / f"1f1b_{vocabulary}_p4_m8.txt").read_text()
    assert make_plan("1f1b", vocabulary, 4, 8).to_text() == golden


@given(vocabularies, st.integers(1, 6))
def test_one_rank_alone(vocabulary: str, microbatches: int) -> None:
    plan = make_plan("1f1b", vocabulary, 1, microbatches)
    work = sum(unit_cost(0, item) for item in plan.rows[0])
    assert makespan(plan) == pytest.approx(work)
    order = [item for item in plan.rows[0] if item.kind == "B"]
    assert order == [Pass("B", i) for i in range(microbatches)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("2f2b", "none", 2, 2), "unknown schedule '2f2b': choose one of 1f1b"),
        (("1f1b", "vocab-3", 2, 2), "unknown vocabulary treatment 'vocab-3': choose one of none"),
        (("1f1b", "none", 0, 2), "at least 1 rank, got 0"),
        (("1f1b", "none", 2, 0), "at least 1 microbatch, got 0"),
    ],
)
def test_what_is_no_plan_is_refused(arguments: tuple[str, str, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan(*arguments)
