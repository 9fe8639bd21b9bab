"""The times that list scheduling itself tells are those of its rows."""

from random import Random

from harness.properties import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules.cases import (
    cases,
    plans_of_blocks,
    problem_of,
    random_costs,
    rows_of,
    seeds,
    with_comms,
)

from megatron.schedules.costs import UNIT_COSTS
from megatron.schedules.make_plan import make_plan
from megatron.schedules.plan import Plan
from megatron.schedules.search.justify import planned, scheduled
from megatron.schedules.search.list_schedule import Rule, listed

any_plan = plans_of_blocks | st.builds(lambda case: case.plan, cases(passes=60))


@settings(max_examples=examples(150))
@given(
    any_plan, seeds, st.sampled_from([0.0, 0.25, 1.0]), st.sampled_from(["base", "keys", "late"])
)
def test_passes_that_start_at_once_have_the_times_of_a_walk(
    plan: Plan, seed: int, slack: float, way: str
) -> None:
    problem = problem_of(
        plan, with_comms(random_costs(seed, plan.ranks, plan.chunks), seed, longest=3)
    )
    base = scheduled(problem, rows_of(problem, plan))
    places, random = planned(problem, base.rows, base.starts), Random(seed)
    keys = [sorted(time + random.gauss(0, 5) for time in row) for row in places]
    begin = [random.choice([0.0, 2.0]) for _ in plan.rows] if way == "late" else []
    rule = Rule(slack, keys=keys if way == "keys" else (), planned=places, begin=begin)
    found = listed(problem, base.rows, rule)
    walked = scheduled(problem, found.rows)
    told = found.starts, found.ends
    assert (told == (walked.starts, walked.ends)) or not found.is_earliest
    ends = zip(found.ends, walked.ends, strict=True)
    assert plan.treatment.synchronous or all(
        end >= least for own, walk in ends for end, least in zip(own, walk, strict=True)
    )


def test_a_plan_in_the_order_of_its_block_is_told_without_a_walk() -> None:
    """Otherwise the property above would hold of a search that never tells its times."""
    plan = make_plan("1f1b", "vocab-2", 4, 12, shortened=False)
    problem = problem_of(plan, UNIT_COSTS)
    base = scheduled(problem, rows_of(problem, plan))
    rule = Rule(planned=planned(problem, base.rows, base.starts))
    found = listed(problem, base.rows, rule)
    assert found.is_earliest
    assert max(map(max, found.ends)) <= base.end
