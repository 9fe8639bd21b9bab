"""Unrolling repeats a block every interval and orders its passes by their start times."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedules import by_hand
from schedules.cases import blocks, random_costs, seeds

from megatron.schedules.blocks.block import Block, Slot, unroll
from megatron.schedules.check import check
from megatron.schedules.treatments import TREATMENTS


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
    assert by_hand.end_times(plan, random_costs(seed, plan.ranks, plan.chunks))


def test_passes_without_duration_go_first_and_t_frees_before_s_takes() -> None:
    inserted = tuple(Slot(4, 0, kind) for kind in ("IF", "IB", "S", "E", "T"))
    block = Block(
        ((Slot(0, 1, "F"), Slot(4, 1, "B"), *inserted),), ((0, 0),), 6, TREATMENTS["naive"]
    )
    assert " ".join(map(str, unroll(block, 1).rows[0])) == "F0 T0 E0 S0 IB0 IF0 B0"


def test_where_the_output_layer_is_synchronous_t_follows_its_s() -> None:
    slots = (Slot(0, 1, "F"), Slot(1, 0, "S"), Slot(1, 0, "T"), Slot(4, 1, "B"))
    block = Block((slots,), ((0, 0),), 3, TREATMENTS["interlaced"])
    plan = unroll(block, 2)
    assert plan.treatment.synchronous
    assert " ".join(map(str, plan.rows[0])) == "F0 S0 T0 F1 S1 T1 B0 B1"


def test_microbatches_of_a_group_pass_a_chunk_before_the_next() -> None:
    """Two chunks take turns every 2 microbatches: a group comes 2 x 2 intervals after the last."""
    slots = (Slot(0, 1, "F", 0), Slot(6, 1, "F", 1), Slot(7, 2, "B", 1), Slot(13, 2, "B", 0))
    block = Block((slots,), ((0, 0), (0, 1)), 3, group=2)
    assert (block.chunks, block.period) == (2, 12)
    assert [block.start(slots[1], i) for i in range(5)] == [6, 9, 18, 21, 30]
    plan = unroll(block, 3)
    check(plan)
    row = "F0 F1 F0.1 B0.1 F1.1 B1.1 F2 B0 B1 F2.1 B2.1 B2"
    assert " ".join(map(str, plan.rows[0])) == row


def test_a_turn_may_be_that_of_several_chunks() -> None:
    """Both chunks of a turn go on every interval of 6; a group of 2 comes 2 x 6 after the last."""
    slots = (Slot(0, 1, "F", 0), Slot(3, 1, "F", 1), Slot(4, 2, "B", 1), Slot(7, 2, "B", 0))
    block = Block((slots,), ((0, 0), (0, 1)), 6, group=2, chunks_per_turn=2)
    assert (block.chunks, block.period) == (2, 12)
    assert [block.start(slots[1], i) for i in range(5)] == [3, 9, 15, 21, 27]
    plan = unroll(block, 2)
    check(plan)
    assert " ".join(map(str, plan.rows[0])) == "F0 F0.1 B0.1 F1 B0 F1.1 B1.1 B1"


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
