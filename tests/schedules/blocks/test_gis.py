"""What table 1 of arXiv 2503.01328 says of GIS, GIS-H and PipeOffload, and of what they improve.

M, the memory of 1F1B, is v p chunks on the first rank. Times are of a chunk, communication is free.
"""

import pytest
from harness.properties import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules import by_hand

from megatron.schedules.blocks.gis import entries, half_of
from megatron.schedules.costs import Costs
from megatron.schedules.held import in_flight
from megatron.schedules.make_plan import make_plan
from megatron.schedules.plan import Plan

ranks = st.integers(1, 12)
chunks = st.integers(2, 6)
times = st.integers(1, 9)
like_times = times.flatmap(
    lambda w: st.tuples(st.integers(w, 2 * w), st.integers(w, 2 * w), st.just(w))
)
"""F and B take between W and twice W."""


def plan_of(schedule: str, p: int, m: int, v: int) -> Plan:
    return make_plan(schedule, "none", p, m, chunks=v, shortened=False)


def held(plan: Plan) -> float:
    """Return the most chunks of activations on any rank."""
    return round(max(in_flight(plan)) * plan.chunks, 6)


def idle(plan: Plan, f: float, b: float, w: float) -> float:
    """Return the time of an iteration in which a rank does not work."""
    span = by_hand.span(plan, Costs({"F": f, "B": b, "W": w}))
    return span - plan.microbatches * plan.chunks * (f + b + w)


@settings(max_examples=examples(30))
@given(ranks, chunks, st.integers(2, 4))
def test_memory_of_the_table(p: int, v: int, more: int) -> None:
    m = more * p
    assert held(make_plan("1f1b", "none", p, m)) * v == v * p
    assert held(plan_of("interleaved", p, m, v)) == (v + 1) * p - 1
    assert held(plan_of("gis", p, m, v)) == v * p
    assert held(plan_of("gis-h", p, m, v)) == (v - 1) * half_of(p) + p
    if p % 2 == 0:
        assert held(plan_of("gis-h", p, m, v)) == (v + 1) / (2 * v) * (v * p)


@settings(max_examples=examples(20))
@given(st.integers(1, 6), st.integers(2, 4), times, times, times)
def test_idle_time_of_gis(p: int, v: int, f: int, b: int, w: int) -> None:
    assert idle(plan_of("gis", p, 2 * p, v), f, b, w) == (p - 1) * (f + b)


@settings(max_examples=examples(20))
@given(st.integers(1, 3), st.integers(2, 4), like_times)
def test_idle_time_of_gis_h(half: int, v: int, cost: tuple[int, int, int]) -> None:
    """The table has d / 2 and equal times: p is even here, and no pass much longer than the others.

    If W is longer than F or B, or if B is longer than F and W, ranks wait longer.
    """
    p, (f, b, w) = 2 * half, cost
    beside = half * (v - 1) * (f + b - w)
    assert idle(plan_of("gis-h", p, 2 * p, v), f, b, w) == (p - 1) * (f + b) + beside


@settings(max_examples=examples(30))
@given(ranks, chunks)
def test_forwards_before_the_first_backward(p: int, v: int) -> None:
    """Rank i begins with (v - 1) g + p - i forwards, where groups are of g (section 3.1)."""
    for schedule, group in (("gis", p), ("gis-h", half_of(p))):
        for rank, row in enumerate(plan_of(schedule, p, 3 * p, v).rows):
            first = next(at for at, item in enumerate(row) if item.kind == "B")
            assert first == (v - 1) * group + p - rank


def test_gis_h_as_drawn() -> None:
    """Figure 6, of 4 ranks, 2 chunks and 8 microbatches: the first and the last rank."""
    plan = plan_of("gis-h", 4, 8, 2)
    order = "0 1 0.1 1.1 2 3 2.1 3.1 4 5 4.1 5.1 6 7 6.1 7.1"
    for row in (plan.rows[0], plan.rows[-1]):
        assert [str(item)[1:] for item in row if item.kind == "F"] == order.split()
    drawn = "F0 F1 F0.1 F1.1 F2 F3 B0.1 W0.1 F2.1 B1.1 W1.1 F3.1 B0 W0 F4 B1 W1 F5"
    assert " ".join(map(str, plan.rows[0])).startswith(drawn)
    drawn = "F0 F1 F0.1 B0.1 W0.1 F1.1 B1.1 W1.1 F2 B0 W0 F3 B1 W1 F2.1"
    assert " ".join(map(str, plan.rows[-1])).startswith(drawn)


@settings(max_examples=examples(30))
@given(ranks, st.integers(2, 16))
def test_a_rank_of_pipeoffload_works_on_one_chunk_in_every_interval(p: int, v: int) -> None:
    """So it holds the same in every interval: in intervals, the last entry and p."""
    found = entries(p, v)
    assert sorted(at % v for at in found) == [*range(v)]
    assert held(plan_of("pipeoffload", p, 4 * p, v)) == found[-1] + p
    assert found[-1] >= (v - 1) * half_of(p)


@pytest.mark.parametrize("v", [2, 3, 4, 5, 8, 16])
@pytest.mark.parametrize("p", [4, 8, 16])
def test_pipeoffload_holds_hardly_more_than_gis_h(p: int, v: int) -> None:
    least = (v - 1) * half_of(p) + p
    assert least <= held(plan_of("pipeoffload", p, 4 * p, v)) <= 1.2 * least


@settings(max_examples=examples(20))
@given(st.integers(2, 6), st.integers(2, 4), like_times)
def test_pipeoffload_idles_less_than_1f1b(p: int, v: int, cost: tuple[int, int, int]) -> None:
    """The table's bound, for times of which none is much longer than the others."""
    assert idle(plan_of("pipeoffload", p, 2 * p, v), *cost) < v * (p - 1) * sum(cost)
