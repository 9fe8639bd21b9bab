"""Unrolling repeats a block every interval and orders its passes by their start times."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedules import by_hand
from schedules.cases import RandomCosts, blocks, seeds

from megatron.schedules.block import Block, Slot, unroll
from megatron.schedules.check import check


@given(blocks(), st.integers(1, 6))
def test_rows_are_in_the_order_of_start_times(block: Block, microbatches: int) -> None:
    plan = unroll(block, microbatches)
    for slots, row in zip(block.rows, plan.rows, strict=True):
        begin = {(slot.kind, slot.chunk): slot.start for slot in slots}
        times = [begin[p.kind, p.chunk] + p.microbatch * block.interval for p in row]
        assert times == sorted(times)
        assert len(row) == len(set(row)) == len(slots) * microbatches


@given(blocks(), st.integers(1, 6), seeds)
def test_a_block_that_keeps_its_needs_unrolls_to_a_plan_without_deadlock(
    block: Block, microbatches: int, seed: int
) -> None:
    plan = unroll(block, microbatches)
    check(plan)
    assert by_hand.end_times(plan, RandomCosts(seed, plan.ranks))


def test_passes_without_duration_go_first_and_t_frees_before_s_takes() -> None:
    inserted = (Slot(4, 0, "IF"), Slot(4, 0, "IB"), Slot(4, 0, "S"), Slot(4, 0, "T"))
    block = Block(((Slot(0, 1, "F"), Slot(4, 1, "B"), *inserted),), ((0, 0),), 6, barriers=1)
    assert " ".join(map(str, unroll(block, 1).rows[0])) == "F0 T0 S0 IB0 IF0 B0"


def test_a_v_shaped_block() -> None:
    """The data goes down the ranks in chunk 0 and comes back up in chunk 1."""
    rows = (
        (Slot(0, 1, "F", 0), Slot(3, 1, "F", 1), Slot(4, 1, "B", 1), Slot(7, 1, "B", 0)),
        (Slot(1, 1, "F", 0), Slot(2, 1, "F", 1), Slot(5, 1, "B", 1), Slot(6, 1, "B", 0)),
    )
    plan = unroll(Block(rows, ((0, 0), (1, 0), (1, 1), (0, 1)), interval=6), 2)
    check(plan)
    assert plan.to_text().splitlines()[3:] == [
        "0: F0 F0.1 B0.1 F1 B0 F1.1 B1.1 B1",
        "1: F0 F0.1 B0.1 B0 F1 F1.1 B1.1 B1",
    ]


@pytest.mark.parametrize("microbatches", [0, -1])
def test_no_microbatch_is_no_iteration(microbatches: int) -> None:
    block = Block(((Slot(0, 1, "F"), Slot(1, 2, "B")),), ((0, 0),), 3)
    with pytest.raises(ValueError, match=f"at least 1 microbatch, got {microbatches}"):
        unroll(block, microbatches)


def test_a_slot_is_found_by_stage() -> None:
    block = Block(
        (
            (Slot(0, 1, "F", 0), Slot(3, 1, "F", 1)),
            (Slot(1, 1, "F", 0), Slot(2, 1, "F", 1)),
        ),
        ((0, 0), (1, 0), (1, 1), (0, 1)),
        interval=4,
    )
    assert [block.slot(stage, "F").start for stage in range(4)] == [0, 1, 2, 3]
    assert block.slot(3, "F").end == 4


@pytest.mark.parametrize("second", [1, 3, -1])
def test_slots_that_run_into_each_other_are_refused(second: float) -> None:
    with pytest.raises(ValueError, match=r"rank 0: . at .* runs into . at .* every 2: move one"):
        Block(((Slot(0, 2, "F"), Slot(second, 2, "B")),), ((0, 0),), 2)
