"""Ticks lose nothing of durations written with a few digits, and little of all others."""

from fractions import Fraction
from math import ceil, floor

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron.schedules.blocks.block import unroll
from megatron.schedules.blocks.one_f_one_b import one_f_one_b
from megatron.schedules.costs import Costs
from megatron.schedules.graph import Graph
from megatron.schedules.search.optimal import in_ticks, tick_of

PLAN = unroll(one_f_one_b(2), 2)


def test_the_tick_is_the_largest_that_all_durations_are_multiples_of() -> None:
    assert tick_of(Graph(PLAN, Costs({"F": 1.0, "B": 2.0}))) == 1
    assert tick_of(Graph(PLAN, Costs({"F": 0.5, "B": 0.75}, {"X": 0.05}))) == Fraction(1, 20)
    assert tick_of(Graph(PLAN, Costs({"F": 18522, "B": 18086}, {"X": 602}))) == 2


def test_a_sum_in_floating_point_counts_as_the_decimal_number_that_was_meant() -> None:
    assert tick_of(Graph(PLAN, Costs({"F": 0.1, "B": 0.1 + 0.2}))) == Fraction(1, 10)


def test_nothing_takes_time() -> None:
    costs = Costs({"F": 0, "B": 0})
    ticks = in_ticks(PLAN, costs, tick_of(Graph(PLAN, costs)), floor)
    assert set(Graph(PLAN, ticks).times) == {0}


@example(forward=1.0, backward=100.0, send=1 / 256)
@given(forward=st.floats(1e-3, 1e3), backward=st.floats(1e-3, 1e3), send=st.floats(1e-3, 1e3))
def test_rounding_is_in_the_direction_asked_for_and_small(
    forward: float, backward: float, send: float
) -> None:
    costs = Costs({"F": forward, "B": backward}, {"X": send})
    graph = Graph(PLAN, costs)
    tick = tick_of(graph)
    down = Graph(PLAN, in_ticks(PLAN, costs, tick, floor))
    up = Graph(PLAN, in_ticks(PLAN, costs, tick, ceil))
    smallest = 1e-9 * max(*graph.times, *graph.comm_times)
    for low, high, time in zip(
        (*down.times, *down.comm_times),
        (*up.times, *up.comm_times),
        (*graph.times, *graph.comm_times),
        strict=True,
    ):
        assert low == int(low)
        assert 0 <= high - low <= 1
        assert low * tick <= time * (1 + 1e-11)
        assert low * tick == pytest.approx(time, rel=1e-5, abs=smallest)
