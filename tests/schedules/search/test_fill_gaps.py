"""Filling gaps makes no pass late; that it keeps limits and orders, ``test_shorten`` says."""

from collections.abc import Mapping

from harness.properties import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules import by_hand
from schedules.cases import (
    cases,
    plan_with,
    plans_of_blocks,
    problem_of,
    random_costs,
    rows_of,
    seeds,
    with_comms,
)

from megatron.schedules.costs import Costs
from megatron.schedules.make_plan import make_plan
from megatron.schedules.passes import Pass
from megatron.schedules.plan import Plan
from megatron.schedules.search.fill_gaps import fill_gaps
from megatron.schedules.search.justify import scheduled, to_the_left

any_plan = plans_of_blocks | st.builds(lambda case: case.plan, cases(passes=60))


def filled(plan: Plan, costs: Costs) -> Plan:
    problem = problem_of(plan, costs)
    base = scheduled(problem, rows_of(problem, plan))
    return plan_with(plan, problem, fill_gaps(problem, base).rows)


def ends(plan: Plan, costs: Costs) -> Mapping[tuple[int, Pass], float]:
    timed = zip(plan.rows, by_hand.end_times(plan, costs), strict=True)
    return {
        (rank, item): end
        for rank, (row, times) in enumerate(timed)
        for item, end in zip(row, times, strict=True)
    }


@settings(max_examples=examples(80))
@given(any_plan, seeds)
def test_no_pass_is_later_than_before(plan: Plan, seed: int) -> None:
    costs = with_comms(random_costs(seed, plan.ranks, plan.chunks), seed, 3)
    before, after = ends(plan, costs), ends(filled(plan, costs), costs)
    assert all(after[item] <= end for item, end in before.items())


@settings(max_examples=examples(40))
@given(any_plan, seeds, st.sampled_from([1e-9, 0.1, 3.7, 1e9]))
def test_the_unit_of_time_does_not_matter(plan: Plan, seed: int, unit: float) -> None:
    """A gap that a pass fits exactly is not missed by rounding."""
    one, other = (random_costs(seed, plan.ranks, plan.chunks, each) for each in (1.0, unit))
    assert filled(plan, one) == filled(plan, other)


def test_1f1b_v_is_shorter_than_by_list_scheduling() -> None:
    """A list scheduler lets forwards of the warm-up run into backwards that it sees too late."""
    costs = Costs({"F": 1.0, "B": 2.0})
    plan = make_plan("1f1b-v", "none", 6, 12, shortened=False)
    problem = problem_of(plan, costs)
    base = scheduled(problem, rows_of(problem, plan))
    found = [to_the_left(problem, base, 0.0), fill_gaps(problem, base)]
    idle = [by_hand.span(plan_with(plan, problem, one.rows), costs) - 72 for one in (base, *found)]
    assert idle[0] > idle[1] > idle[2] == 23
