"""Earliest times are longest paths, and a plan gets stuck exactly where those run in a circle."""

import graphlib
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules import by_hand
from schedules.cases import Case, RandomCosts, blocks, cases, seeds

from megatron.schedules.block import Block, unroll
from megatron.schedules.check import check
from megatron.schedules.needs import Comm
from megatron.schedules.plan import Plan, evaluation_plan
from megatron.schedules.timing import earliest, unit_cost
from megatron.schedules.vocabulary import with_vocabulary


def assert_longest_paths(plan: Plan, costs: RandomCosts) -> None:
    timing = earliest(plan, costs)
    assert not timing.stuck
    assert [list(row) for row in timing.ends] == by_hand.end_times(plan, costs)
    for rank, row in enumerate(plan.rows):
        lasted = [e - s for s, e in zip(timing.starts[rank], timing.ends[rank], strict=True)]
        assert lasted == [costs(rank, item) for item in row]


@settings(max_examples=40)
@given(cases(), seeds, st.booleans())
def test_times_are_longest_paths(case: Case, seed: int, evaluate: bool) -> None:
    plan = evaluation_plan(case.plan) if evaluate else case.plan
    assert_longest_paths(plan, RandomCosts(seed, case.ranks))


@given(blocks(), st.sampled_from([None, 1, 2]), st.integers(1, 5), seeds)
def test_times_are_longest_paths_for_any_stages(
    block: Block, barriers: int | None, microbatches: int, seed: int
) -> None:
    plan = unroll(with_vocabulary(block, barriers) if barriers else block, microbatches)
    assert_longest_paths(plan, RandomCosts(seed, plan.ranks))


@given(cases(ranks=5), st.integers(0, 10**6), st.integers(1, 6))
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
        ends = by_hand.end_times(plan, unit_cost)
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
        "microbatches 1\nstages 0.0 1.0\nbarriers 1\n"
        "0: IF0 F0 S0 T0 B0 IB0\n"
        "1: IF0 F0 S0 T0 B0 IB0\n"
    )
    length = {"IF": 1, "F": 2, "S": 3, "T": 4, "B": 5, "IB": 6}
    timing = earliest(plan, lambda rank, item: length[item.kind] * (10.0 if rank else 1.0))
    assert timing.ready == {
        Comm("CIF", 0): 10,  # rank 1 takes 10, rank 0 only 1
        Comm("X", 0, 0): 12,
        Comm("C0", 0): 32,
        Comm("C1", 0): 62,
        Comm("G", 0, 1): 152,  # rank 1: T 62-102, B 102-152
        Comm("CIB", 0): 157,
    }
