"""Shortening saves time, holds no more, and changes nothing where it saves none."""

from collections import defaultdict

from harness.properties import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules import by_hand
from schedules.cases import (
    BARRIERS,
    Case,
    cases,
    few_trials,
    plan_with,
    plans_of_blocks,
    problem_of,
    random_costs,
    rows_of,
    seeds,
    with_comms,
)

from megatron.schedules.blocks.block import unroll
from megatron.schedules.blocks.one_f_one_b import one_f_one_b
from megatron.schedules.check import check
from megatron.schedules.costs import Costs
from megatron.schedules.held import Held, peak_held
from megatron.schedules.make_plan import make_plan
from megatron.schedules.passes import Pass
from megatron.schedules.plan import Plan
from megatron.schedules.search.automatic import one_by_one
from megatron.schedules.search.fill_gaps import fill_gaps
from megatron.schedules.search.justify import justify, scheduled, to_the_left
from megatron.schedules.search.shorten import shorten

any_plan = plans_of_blocks | st.builds(
    lambda case: case.plan, cases(vocabulary=st.sampled_from([*BARRIERS]), passes=40)
)
kept_shares = st.sampled_from([1.0, 0.5])
slack_shares = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=4)


def costs_of(plan: Plan, seed: int) -> Costs:
    return with_comms(random_costs(seed, plan.ranks, plan.chunks), seed, 3)


def by_kind(row: tuple[Pass, ...]) -> dict[tuple[str, int], list[int]]:
    found: dict[tuple[str, int], list[int]] = defaultdict(list)
    for item in row:
        found[item.kind, item.chunk].append(item.microbatch)
    return found


def assert_within(plan: Plan, limits: list[Held], kept: float) -> None:
    for row, limit in zip(plan.rows, limits, strict=True):
        held = peak_held(plan, row, kept)
        assert all(one <= most + 1e-9 for one, most in zip(held, limit, strict=True))


@settings(max_examples=examples(60))
@given(any_plan, seeds, kept_shares)
def test_it_is_never_longer_holds_no_more_and_keeps_the_order_of_each_kind(
    plan: Plan, seed: int, kept: float
) -> None:
    costs = costs_of(plan, seed)
    with few_trials():
        shortened = shorten(plan, costs, kept=kept)
    check(shortened)
    assert by_hand.span(shortened, costs) <= by_hand.span(plan, costs)
    assert_within(shortened, [peak_held(plan, row, kept) for row in plan.rows], kept)
    for before, after in zip(plan.rows, shortened.rows, strict=True):
        assert by_kind(before) == by_kind(after)


@settings(max_examples=examples(10))
@given(st.sampled_from(["zb-h1", "v-half"]), st.sampled_from(["none", "vocab-2"]), seeds)
def test_what_is_tight_already_is_not_lengthened(schedule: str, vocabulary: str, seed: int) -> None:
    """No trial of the second search is taken unless it is shorter than the best of the first."""
    plan = make_plan(schedule, vocabulary, 4, 8, shortened=False)
    costs = costs_of(plan, seed)
    with few_trials():
        once = shorten(plan, costs)
        twice = shorten(once, costs)
    assert by_hand.span(twice, costs) <= by_hand.span(once, costs)


@settings(max_examples=examples(30))
@given(any_plan, seeds, st.integers(0, 3))
def test_higher_limits_are_kept_and_allow_no_longer_plan(plan: Plan, seed: int, more: int) -> None:
    costs = costs_of(plan, seed)
    limits = [Held(*(most + more for most in peak_held(plan, row))) for row in plan.rows]
    with few_trials():
        shortened = shorten(plan, costs, limits)
    assert by_hand.span(shortened, costs) <= by_hand.span(plan, costs)
    assert_within(shortened, limits, 1.0)


@settings(max_examples=examples(20))
@given(any_plan, seeds, st.integers(0, 3))
def test_a_search_without_a_block_keeps_limits_and_is_not_longer_than_its_start(
    plan: Plan, seed: int, more: int
) -> None:
    costs = costs_of(plan, seed)
    slow = one_by_one(plan)
    check(slow)
    limits = [Held(*(most + more for most in peak_held(slow, row))) for row in slow.rows]
    with few_trials():
        shortened = shorten(slow, costs, limits, searched=True)
    check(shortened)
    assert by_hand.span(shortened, costs) <= by_hand.span(slow, costs)
    assert_within(shortened, limits, 1.0)


@settings(max_examples=examples(60))
@given(any_plan, seeds, kept_shares, slack_shares)
def test_every_schedule_on_the_way_runs_within_the_limits(
    plan: Plan, seed: int, kept: float, slacks: list[float]
) -> None:
    """List scheduling from any plan comes to an end, whatever it is allowed to delay."""
    costs = costs_of(plan, seed)
    problem = problem_of(plan, costs, kept)
    start = scheduled(problem, rows_of(problem, plan))
    moved = to_the_left(problem, start, slacks[0])
    justified = justify(problem, start, slacks)
    assert justified.span <= start.span
    filled = [] if problem.graph.followed_by else [fill_gaps(problem, start)]
    for found in (moved, justified, *filled):
        done = plan_with(plan, problem, found.rows)
        check(done)
        assert found.span == by_hand.span(done, costs)
        assert_within(done, list(problem.limits), kept)
        for before, after in zip(plan.rows, done.rows, strict=True):
            assert by_kind(before) == by_kind(after)


@settings(max_examples=examples(40))
@given(cases(vocabulary=st.just("interlaced"), passes=30, shortened=True))
def test_where_the_output_layer_is_synchronous_t_still_follows_its_s(case: Case) -> None:
    for row in case.plan.rows:
        for i, item in enumerate(row):
            if item.kind == "S":
                assert row[i + 1] == Pass("T", item.microbatch)


@settings(max_examples=examples(30))
@given(st.integers(1, 8), st.integers(1, 20))
def test_1f1b_has_nothing_to_gain(ranks: int, microbatches: int) -> None:
    plan = unroll(one_f_one_b(ranks), microbatches)
    assert shorten(plan) == plan


def test_a_weight_gradient_fills_the_gap_before_the_next_backward() -> None:
    """Rank 0 would stand idle from B0 (3 to 4) to B1 (6 to 7): W0 fits in, 9 becomes 8."""
    slow = Plan.from_text(
        "microbatches 2\nstages 0.0 1.0\nvocabulary none\n"
        "0: F0 F1 B0 B1 W0 W1\n"
        "1: F0 B0 W0 F1 B1 W1\n"
    )
    unit = Costs({"F": 1, "B": 1, "W": 1})
    assert by_hand.span(slow, unit) == 9
    shortened = shorten(slow, unit)
    assert by_hand.span(shortened, unit) < 9
    assert " ".join(map(str, shortened.rows[0])) == "F0 F1 B0 W0 B1 W1"


def test_a_forward_is_not_hoisted_beyond_the_memory_of_the_plan() -> None:
    """Rank 0 idles from 1 to 3; F1 would fit but for the second microbatch it would hold."""
    plan = Plan.from_text(
        "microbatches 2\nstages 0.0 1.0\nvocabulary none\n0: F0 B0 F1 B1\n1: F0 B0 F1 B1\n"
    )
    unit = Costs({"F": 1, "B": 1})
    assert shorten(plan, unit) == plan
    room = [Held(2, 0, 0), Held(1, 0, 0)]
    assert shorten(plan, unit, room).rows[0] == (
        Pass("F", 0),
        Pass("F", 1),
        Pass("B", 0),
        Pass("B", 1),
    )
