"""Fillers that wait for the cool-down, and ranks that idle only as long as they may."""

from harness.properties import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules import by_hand
from schedules.cases import cases, plan_with, problem_of, random_costs, rows_of, seeds

from megatron.schedules.check import check
from megatron.schedules.costs import Costs
from megatron.schedules.held import peak_held
from megatron.schedules.make_plan import make_plan
from megatron.schedules.plan import Plan
from megatron.schedules.search.cool_down import cooled_down
from megatron.schedules.search.justify import Scheduled, planned, scheduled
from megatron.schedules.search.list_schedule import Rule, list_schedule

split = cases(["zb-h1", "zb-h2", "zb-v", "v-half", "v-min"], passes=40)


def trials(plan: Plan, costs: Costs, affordable: int) -> list[Scheduled]:
    """Return the trials of at most ``affordable`` placements."""
    problem, left = problem_of(plan, costs), [affordable]

    def affords(placements: int) -> bool:
        left[0] -= placements
        return left[0] >= 0

    base = rows_of(problem, plan)
    now = scheduled(problem, base)
    work = [
        sum(costs.of_pass(plan, rank, item) for item in row) for rank, row in enumerate(plan.rows)
    ]
    return [*cooled_down(problem, base, planned(problem, base, now.starts), work, affords)]


@settings(max_examples=examples(40))
@given(st.data(), seeds, st.integers(0, 20))
def test_trials_run_hold_no_more_and_are_no_more_than_is_afforded(
    data: st.DataObject, seed: int, affordable: int
) -> None:
    plan = data.draw(split).plan
    costs = random_costs(seed, plan.ranks, plan.chunks)
    problem, found = problem_of(plan, costs), trials(plan, costs, affordable)
    assert len(found) <= affordable
    for one in found:
        new = plan_with(plan, problem, one.rows)
        check(new)
        for before, after in zip(plan.rows, new.rows, strict=True):
            assert sorted(before) == sorted(after)
            held = zip(peak_held(new, after), peak_held(plan, before), strict=True)
            assert all(now <= then + 1e-9 for now, then in held)


def test_weight_gradients_put_off_and_an_allowance_of_idle_time_each_shorten_zb_v() -> None:
    """With F : B : W = 18 : 20 : 14 a rank gets B every 40 units, and has 34 of work for each."""
    costs = Costs({"F": 18.0, "B": 20.0, "W": 14.0})
    plan = make_plan("zb-v", "none", 4, 12, shortened=False)
    block = by_hand.span(plan, costs)
    spans = [found.span for found in trials(plan, costs, 6)]
    assert spans[0] < block
    assert min(spans[1:]) < spans[0]


def test_a_rank_that_may_not_idle_starts_a_filler_instead_of_waiting() -> None:
    """Rank 0 gets B1 at 13, when W0 would run from 9 to 14: it waits for B1 only if it may."""
    costs = Costs({"F": 1.0, "B": [2.0, 5.0], "W": [5.0, 0.5]})
    plan = make_plan("zb-h1", "none", 2, 2, shortened=False)
    problem = problem_of(plan, costs)
    base = rows_of(problem, plan)
    keys = planned(problem, base, scheduled(problem, base).starts)
    last = [
        [key + 1000 * filler for key in row]
        for row, filler in zip(keys, problem.graph.fillers, strict=True)
    ]

    def row(idle: list[float]) -> str:
        rows = list_schedule(problem, base, Rule(keys=last, idle=idle))
        return " ".join(map(str, problem.graph.plan_row(rows[0])))

    assert row([]) == row([1000.0, 1000.0]) == "F0 F1 B0 B1 W0 W1"
    assert row([8.0, 1000.0]) == "F0 F1 B0 W0 B1 W1"
