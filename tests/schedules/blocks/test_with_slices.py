"""Slices go into any block; they shorten the bubble, the memory and the delay of a barrier."""

from collections import defaultdict
from fractions import Fraction

import pytest
from harness.properties import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules import by_hand
from schedules.cases import BARRIERS, UNGROUPED, blocks, random_costs, seeds, vocabularies

from megatron.schedules.blocks.block import Block, unroll
from megatron.schedules.blocks.one_f_one_b import one_f_one_b
from megatron.schedules.blocks.with_slices import with_slices
from megatron.schedules.blocks.with_vocabulary import with_vocabulary
from megatron.schedules.check import check
from megatron.schedules.costs import Costs
from megatron.schedules.held import in_flight
from megatron.schedules.lower import lower
from megatron.schedules.make_plan import make_plan
from megatron.schedules.needs import Comm, needs
from megatron.schedules.passes import Pass
from megatron.schedules.plan import Plan
from megatron.schedules.treatments import TREATMENTS
from megatron.simulator.simulate import simulate

slices = st.sampled_from([2, 3, 4, 8])


def sliced(block: Block, vocabulary: str, n: int, microbatches: int) -> Plan:
    treatment = TREATMENTS[vocabulary]
    return unroll(
        with_slices(with_vocabulary(block, treatment) if treatment.is_sharded else block, n),
        microbatches,
    )


@settings(max_examples=examples(30))
@given(blocks(), vocabularies, slices, st.integers(1, 5), seeds)
def test_any_block_becomes_a_plan_without_deadlock(
    block: Block, vocabulary: str, n: int, microbatches: int, seed: int
) -> None:
    plan = sliced(block, vocabulary, n, microbatches)
    check(plan)
    assert by_hand.end_times(plan, random_costs(seed, plan.ranks, plan.chunks))
    assert Plan.from_text(plan.to_text()) == plan


@settings(max_examples=examples(30))
@given(blocks(), vocabularies, slices, st.integers(1, 4))
def test_forwards_take_the_slices_up_and_backwards_down(
    block: Block, vocabulary: str, n: int, microbatches: int
) -> None:
    for row in sliced(block, vocabulary, n, microbatches).rows:
        order: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
        for item in row:
            order[item.kind, item.chunk].append((item.microbatch, item.slice))
        for (kind, _), units in order.items():
            down = kind in ("B", "W", "IB")
            steps = range(n - 1, -1, -1) if down else range(n)
            assert units == [(i, s) for i in range(microbatches) for s in steps]


def test_one_slice_leaves_a_block_as_it_is() -> None:
    block = one_f_one_b(3)
    assert with_slices(block, 1) == block
    with pytest.raises(ValueError, match="has 2 slices already"):
        with_slices(with_slices(block, 2), 2)


@settings(max_examples=examples(30))
@given(st.integers(1, 9), st.sampled_from([1, 2, 4, 8]), st.integers(0, 5))
def test_1f1b_idles_and_holds_an_nth_of_the_rest(p: int, n: int, more: int) -> None:
    """(p - 1) (F + B) / n and (n + p - 1) / n, to the last digit: times are in whole numbers."""
    m, costs = -(-p // n) + 1 + more, Costs({"F": n, "B": 2 * n})
    plan = make_plan("1f1b", "none", p, m, costs, slices=n, shortened=False)
    assert simulate(lower(plan, costs), costs).end == m * 3 * n + (p - 1) * 3
    assert Fraction(max(in_flight(plan))) == Fraction(n + p - 1, n)


@settings(max_examples=examples(20))
@given(
    st.sampled_from(UNGROUPED),
    st.sampled_from(["vocab-2", "vocab-1", "naive"]),
    st.integers(1, 8),
    st.sampled_from([2, 4, 8]),
)
def test_each_barrier_holds_one_slice_more(schedule: str, vocabulary: str, p: int, n: int) -> None:
    m = (4 * p + 3) // n + 3
    without = make_plan(schedule, "none", p, m, slices=n, shortened=False)
    held = in_flight(make_plan(schedule, vocabulary, p, m, slices=n, shortened=False))
    assert held == [most + BARRIERS[vocabulary] / n for most in in_flight(without)]


@settings(max_examples=examples(20))
@given(st.integers(2, 6), st.integers(2, 4), st.integers(1, 3), st.integers(1, 3))
def test_interleaved_is_slimpipes_order(p: int, v: int, turns: int, m: int) -> None:
    """Groups of p slices take turns; a rank holds v n + 2 (p - 1) of v n chunks of a microbatch.

    The warm-up of rank r is v n - 1 + 2 (p - 1 - r) (arXiv 2504.14519).
    """
    n = p * turns
    plan = make_plan("interleaved", "none", p, m, chunks=v, slices=n, shortened=False)
    order = [
        (group * p + i, chunk) for group in range(m * turns) for chunk in range(v) for i in range(p)
    ]
    up = [Pass("F", unit // n, chunk, unit % n) for unit, chunk in order]
    down = [Pass("B", unit // n, v - 1 - chunk, n - 1 - unit % n) for unit, chunk in order]
    for rank, row in enumerate(plan.rows):
        warm_up = min(v * n - 1 + 2 * (p - 1 - rank), len(order))
        expected = up[:warm_up]
        for forward, backward in zip(up[warm_up:], down, strict=False):
            expected += [forward, backward]
        assert [*row] == expected + down[len(order) - warm_up :]


def test_needs_go_up_for_forwards_and_down_for_backwards() -> None:
    plan = make_plan("1f1b", "vocab-1", 2, 2, slices=3)
    assert needs(plan, 1, Pass("F", 1, 0, 2)) == (Comm("X", 1, 0, 2), Pass("F", 1, 0, 1))
    assert needs(plan, 1, Pass("B", 1, 0, 1)) == (
        Pass("F", 1, 0, 1),
        Comm("C2", 1, 0, 1),
        Pass("B", 1, 0, 2),
    )
    assert needs(plan, 0, Pass("T", 1, 0, 2)) == (Pass("S", 1, 0, 2), Comm("C1", 1, 0, 2))
    assert str(Comm("X", 1, 0, 2)) == "X1/2 from 0"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("F0 F0/1 B0 B0/1", "rank 0 waits at B0 for B0/1"),
        ("F0/1 F0 B0/1 B0", "rank 0 waits at F0/1 for F0"),
        ("F0 F0/1 B0/1 F0/1", "rank 0 runs F0/1 twice"),
        ("F0 F0/1 B0/1 B0/2", "rank 0 cannot run B0/2"),
        ("F0 F0/1 B0/1", "rank 0 never runs B0"),
        ("F0", "a rank has 1 pass, too few for 2 slices of a microbatch"),
    ],
)
def test_check_knows_slices(rows: str, message: str) -> None:
    header = "microbatches 1\nstages 0.0\nvocabulary none\nslices 2\n"
    plan = Plan.from_text(f"{header}0: {rows}\n")
    with pytest.raises(ValueError, match=message):
        check(plan)
