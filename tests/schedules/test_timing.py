"""Earliest times are longest paths, and a plan gets stuck exactly where those run in a circle."""

import graphlib
from dataclasses import replace
from random import Random

import pytest
from harness.properties import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules import by_hand
from schedules.cases import BARRIERS, Case, cases, plans_of_blocks, random_costs, seeds, with_comms

from megatron.schedules.check import check
from megatron.schedules.costs import UNIT_COSTS, Costs
from megatron.schedules.needs import Comm
from megatron.schedules.plan import Plan, evaluation_plan
from megatron.schedules.timing import earliest, earliest_end, longest_span, working


def assert_longest_paths(plan: Plan, costs: Costs) -> None:
    timing = earliest(plan, costs)
    assert not timing.stuck
    assert [list(row) for row in timing.ends] == by_hand.end_times(plan, costs)
    assert earliest_end(plan, costs) == timing.end
    for rank, row in enumerate(plan.rows):
        lasted = [e - s for s, e in zip(timing.starts[rank], timing.ends[rank], strict=True)]
        assert lasted == [costs.of_pass(plan, rank, item) for item in row]


anything = cases(vocabulary=st.sampled_from([*BARRIERS]), passes=200)


@settings(max_examples=examples(60))
@given(anything, seeds, st.booleans())
def test_times_are_longest_paths(case: Case, seed: int, evaluate: bool) -> None:
    plan = evaluation_plan(case.plan) if evaluate else case.plan
    costs = random_costs(seed, case.ranks, case.chunks)
    assert_longest_paths(plan, with_comms(costs, seed))


@given(plans_of_blocks, seeds)
def test_times_are_longest_paths_for_any_stages(plan: Plan, seed: int) -> None:
    assert_longest_paths(plan, with_comms(random_costs(seed, plan.ranks, plan.chunks), seed))


@given(
    cases(vocabulary=st.sampled_from([*BARRIERS]), passes=30),
    st.integers(0, 10**6),
    st.integers(1, 6),
)
def test_stuck_exactly_if_the_needs_run_in_a_circle(case: Case, seed: int, swaps: int) -> None:
    """Swap neighbours in some rows: now and then the plan survives it."""
    random = Random(seed)
    rows = [list(row) for row in case.plan.rows]
    for _ in range(swaps):
        row = random.choice(rows)
        at = random.randrange(len(row) - 1)
        row[at : at + 2] = reversed(row[at : at + 2])
    plan = replace(case.plan, rows=tuple(map(tuple, rows)))
    try:
        ends = by_hand.end_times(plan, UNIT_COSTS)
    except graphlib.CycleError:
        assert earliest(plan).stuck
        with pytest.raises(ValueError, match="the plan deadlocks: rank"):
            check(plan)
    else:
        check(plan)
        for found, expected in zip(earliest(plan).ends, ends, strict=True):
            assert found == pytest.approx(expected)


def test_a_communication_is_ready_when_its_last_source_has_ended() -> None:
    plan = Plan.from_text(
        "microbatches 1\nstages 0.0 1.0\nvocabulary vocab-2\n"
        "0: IF0 F0 S0 T0 B0 IB0\n"
        "1: IF0 F0 S0 T0 B0 IB0\n"
    )
    timing = earliest(
        plan,
        Costs(
            {"IF": [1, 10], "F": [2, 20], "S": [3, 30], "T": [4, 40], "B": [5, 50], "IB": [6, 60]}
        ),
    )
    assert timing.ready == {
        Comm("CIF", 0): 10,  # rank 1 takes 10, rank 0 only 1
        Comm("X", 0, 0): 12,
        Comm("C0", 0): 32,
        Comm("C1", 0): 62,
        Comm("G", 0, 1): 152,  # rank 1: T 62-102, B 102-152
        Comm("CIB", 0): 157,
    }


@given(st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=5), max_size=4))
def test_spans_count_from_the_first_to_the_last_pass_that_takes_time(
    rows: list[list[tuple[int, int]]],
) -> None:
    spans, times = [0.0], []
    for row in rows:
        now, starts, ends = 0.0, [], []
        for wait, long in row:
            starts.append(now + wait)
            ends.append(now := now + wait + long)
        busy = [i for i, (_, long) in enumerate(row) if long]
        spans += [max(ends[i] for i in busy) - min(starts[i] for i in busy)] if busy else []
        times.append(working(starts, ends))
    assert longest_span(times) == max(spans)
