"""What Hanayo promises (arXiv 2308.15762): the way of its data, the bubble of its waves, memory.

F = 1 and B = 2 a stage, communication free. ``published`` is quoted from a text about the paper,
and the order of another project is written out in ``by_hand``.
"""

from dataclasses import replace

import pytest
from harness.properties import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules import by_hand

from megatron.schedules.check import check
from megatron.schedules.costs import Costs
from megatron.schedules.held import in_flight
from megatron.schedules.make_plan import make_plan
from megatron.schedules.passes import Pass
from megatron.schedules.plan import Plan

ranks = st.integers(1, 12)
waves = st.integers(1, 4)


def plan_of(p: int, m: int, w: int, schedule: str = "hanayo") -> Plan:
    return make_plan(schedule, "none", p, m, chunks=2 * w, shortened=False)


def idle(plan: Plan) -> float:
    """Return the time of an iteration in which a rank idles, in forwards of all its layers."""
    v = plan.chunks
    costs = Costs({"F": 1.0, "B": 2.0})
    return by_hand.span(plan, costs) / v - 3 * plan.microbatches


@settings(max_examples=examples(30))
@given(ranks, waves)
def test_the_data_goes_down_the_ranks_and_up_again_in_every_wave(p: int, w: int) -> None:
    way = [rank for rank, _ in plan_of(p, 1, w).stages]
    assert way == [*range(p), *reversed(range(p))] * w


@settings(max_examples=examples(60))
@given(ranks, st.integers(1, 4), waves)
def test_the_bubble_is_divided_by_the_waves(p: int, groups: int, w: int) -> None:
    """At m = p it is (2 p - 2) / (3 p w + 2 p - 2) of the time; more groups add only work."""
    plan = plan_of(p, groups * p, w)
    assert idle(plan) == pytest.approx(2 * (p - 1) / w)
    if groups == 1:
        share = idle(plan) / (idle(plan) + 3 * p)
        assert share == pytest.approx((2 * p - 2) / (3 * p * w + 2 * p - 2))


def published(p: int, w: int) -> float:
    """The bubble of a round of p microbatches, as a public course quotes it from the paper.

    github.com/Infrasys-AI/AIInfra, 04Train/02ParallelAdv, on pipelines after 1F1B: for w = stages /
    (2 p), with B twice as long as F and free communication.
    """
    return (2 * p - 2) / (3 * p * w + p - 1)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("w", [1, 2, 4])
@pytest.mark.parametrize("p", [4, 5, 6, 7, 8, 12, 16, 24, 32])
def test_it_idles_as_long_as_published_in_a_round_that_counts_the_bubble_whole(
    p: int, w: int
) -> None:
    """Both have 2 p - 2 units of idle time, of which the published round counts half.

    So ours is the smaller share, by at most a fifth, and by less and less with more waves.
    """
    plan = plan_of(p, p, w)
    ours = idle(plan) / (idle(plan) + 3 * p)
    assert 1 / ours == pytest.approx(1 / published(p, w) + 1 / 2)
    assert (3 * w + 1) / (3 * w + 2) < ours / published(p, w) < 1


@settings(max_examples=examples(40))
@given(st.integers(2, 10), st.integers(1, 3), waves)
def test_it_idles_less_than_1f1b_and_interleaved_1f1b_with_its_memory(
    p: int, groups: int, w: int
) -> None:
    """Interleaved 1F1B of as many chunks idles for 3 (p - 1) / v, and holds more than p for it."""
    m = groups * p
    ours, theirs = plan_of(p, m, w), make_plan("1f1b", "none", p, m, shortened=False)
    assert idle(ours) < idle(theirs)
    assert max(in_flight(ours)) <= max(in_flight(theirs)) == p
    interleaved = plan_of(p, m, w, "interleaved")
    assert idle(interleaved) <= idle(ours)
    if groups > 1:
        assert max(in_flight(interleaved)) > p


@settings(max_examples=examples(30))
@given(st.integers(1, 8), waves)
def test_a_group_of_p_runs_as_in_another_project(p: int, w: int) -> None:
    rows = [[str(item) for item in row] for row in plan_of(p, p, w).rows]
    assert rows == [by_hand.wave_by_wave_row(p, rank, p, w) for rank in range(p)]


@settings(max_examples=examples(30))
@given(st.integers(2, 6), st.integers(1, 20), waves)
def test_groups_save_memory_beside_waves_of_all_microbatches(p: int, m: int, w: int) -> None:
    """Where all m microbatches take a wave before the next one, ranks hold m of them.

    They idle as long as ours if groups are full, longer if m < p, and else no longer.
    """
    ours = plan_of(p, m, w)
    rows = (by_hand.wave_by_wave_row(p, rank, m, w) for rank in range(p))
    theirs = replace(ours, rows=tuple(tuple(map(Pass.parse, row)) for row in rows))
    check(theirs)
    assert max(in_flight(theirs)) == m
    assert max(in_flight(ours)) == min(m, p)
    if m >= p:
        assert idle(theirs) == pytest.approx(2 * (p - 1) / w)
    assert idle(ours) <= idle(theirs) + 1e-9 or (m > p and m % p)


@settings(max_examples=examples(60))
@given(ranks, st.integers(1, 40), waves)
def test_every_rank_holds_up_to_p_microbatches(p: int, m: int, w: int) -> None:
    """None more, whatever m is, and from two groups on all ranks hold p: it is balanced."""
    held = in_flight(plan_of(p, m, w))
    assert max(held) <= min(m, p)
    if m >= 2 * p:
        assert held == [p] * p


@settings(max_examples=examples(30))
@given(ranks, st.integers(0, 20), waves)
def test_microbatches_that_fill_no_group_cost_at_most_the_bubble_of_one_wave(
    p: int, more: int, w: int
) -> None:
    assert idle(plan_of(p, p + more, w)) <= 2 * (p - 1) + 1e-9


@pytest.mark.parametrize(("chunks", "way_out"), [(3, "2 or 4"), (5, "4 or 6"), (1, "2")])
def test_half_a_wave_is_refused(chunks: int, way_out: str) -> None:
    message = f"hanayo takes 2, 4, 6, ... chunks a rank, not {chunks}: take {way_out}$"
    with pytest.raises(ValueError, match=message):
        make_plan("hanayo", "none", 4, 8, chunks=chunks)
