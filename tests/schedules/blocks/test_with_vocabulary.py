"""The vocabulary passes go into any block: chunks, V shapes, split weight gradients, idle time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedules import by_hand
from schedules.cases import blocks, random_costs, seeds

from megatron.schedules.blocks.block import Block, Slot, unroll
from megatron.schedules.blocks.interlaced import interlaced
from megatron.schedules.blocks.one_f_one_b import one_f_one_b
from megatron.schedules.blocks.with_vocabulary import with_vocabulary
from megatron.schedules.check import check
from megatron.schedules.held import in_flight
from megatron.schedules.treatments import TREATMENTS, Treatment

BARRIERS = {"vocab-2": 1, "vocab-1": 2, "naive": 3}
VOCAB_2 = TREATMENTS["vocab-2"]
treatments = st.sampled_from([TREATMENTS[name] for name in BARRIERS])


@given(blocks(), treatments, st.integers(1, 6), seeds)
def test_any_block_becomes_a_plan_without_deadlock(
    block: Block, treatment: Treatment, microbatches: int, seed: int
) -> None:
    plan = unroll(with_vocabulary(block, treatment), microbatches)
    check(plan)
    assert by_hand.end_times(plan, random_costs(seed, plan.ranks, plan.chunks))


@given(blocks(), treatments)
def test_every_barrier_holds_one_more_microbatch(block: Block, treatment: Treatment) -> None:
    """In the steady state exactly; the block has as many repetitions in flight as it is long."""
    ends = [slot.end for row in block.rows for slot in row]
    starts = [slot.start for row in block.rows for slot in row]
    microbatches = round((max(ends) - min(starts)) / block.interval) + 4
    without = in_flight(unroll(block, microbatches))
    plan = unroll(with_vocabulary(block, treatment), microbatches)
    assert in_flight(plan) == [held + BARRIERS[treatment.name] for held in without]


@given(blocks(), treatments, st.integers(1, 6))
def test_the_block_keeps_its_own_order(
    block: Block, treatment: Treatment, microbatches: int
) -> None:
    """Forwards stay as they were, and so do backwards and weight gradients among themselves."""
    plain = unroll(block, microbatches)
    plan = unroll(with_vocabulary(block, treatment), microbatches)
    for before, after in zip(plain.rows, plan.rows, strict=True):
        for kinds in ("F", ("B", "W")):
            assert [p for p in after if p.kind in kinds] == [p for p in before if p.kind in kinds]


@given(blocks(), treatments, st.integers(1, 6))
def test_one_share_of_exponentials_at_a_time(
    block: Block, treatment: Treatment, microbatches: int
) -> None:
    """T of a microbatch frees what S of the next one takes, or of the one after if E is between."""
    for row in unroll(with_vocabulary(block, treatment), microbatches).rows:
        labels = [str(p) for p in row if p.kind in ("S", "T")]
        late = 1 if treatment.name == "naive" else 0
        turns = [(i, "S", i) for i in range(microbatches)]
        turns += [(i + late, "T", i) for i in range(microbatches)]
        assert labels == [f"{kind}{i}" for _, kind, i in sorted(turns)]


@given(blocks(), treatments)
def test_inserted_passes_interrupt_nothing(block: Block, treatment: Treatment) -> None:
    """However often the block repeats, no pass is running where one is inserted."""
    done = with_vocabulary(block, treatment)
    for row in done.rows:
        timed = [slot for slot in row if slot.duration]
        inserted = [slot for slot in row if not slot.duration]
        between = ["E"] if treatment.name == "naive" else []
        expected = [*between, "IB", "IF", "S", "T"]
        assert sorted(slot.kind for slot in inserted) == expected
        for slot in inserted:
            for other in timed:
                into = (slot.start - other.start) % block.interval
                assert into == 0 or into >= other.duration


@given(st.integers(1, 16), treatments)
def test_collectives_have_an_interval_to_hide_in(ranks: int, treatment: Treatment) -> None:
    """From S to T and IF to F an interval passes, over E two; each barrier holds B back by one."""
    barriers = BARRIERS[treatment.name]
    block = with_vocabulary(one_f_one_b(ranks), treatment)
    times = [{slot.kind: slot for slot in row} for row in block.rows]
    last_s = max(row["S"].start for row in times)
    for row in times:
        assert row["S"].start >= times[-1]["F"].end
        assert row["T"].start == row["S"].start + max(1, barriers - 1) * block.interval
        if "E" in treatment.output_passes:
            assert row["E"].start == row["S"].start + block.interval
        assert row["IF"].start <= times[0]["F"].start - block.interval
        assert row["IB"].start >= times[0]["B"].end + block.interval
    original = one_f_one_b(ranks).slot(ranks - 1, "B").start
    assert times[-1]["B"].start == original + barriers * block.interval
    assert times[-1]["B"].start >= last_s + (barriers - 1) * block.interval


def test_a_block_has_its_vocabulary_passes_once() -> None:
    with pytest.raises(ValueError, match="already has vocabulary passes"):
        with_vocabulary(with_vocabulary(one_f_one_b(2), VOCAB_2), VOCAB_2)


@pytest.mark.parametrize("name", ["none", "redis"])
def test_a_whole_vocabulary_has_no_passes(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} has no vocabulary passes: leave the block"):
        with_vocabulary(one_f_one_b(2), TREATMENTS[name])


def test_ranks_that_meet_have_a_block_of_their_own() -> None:
    with pytest.raises(ValueError, match=r"interlaced overlaps nothing: take blocks\.interlaced"):
        with_vocabulary(one_f_one_b(2), TREATMENTS["interlaced"])
    with pytest.raises(ValueError, match=r"vocab-2 is not synchronous: take .*with_vocabulary"):
        interlaced(one_f_one_b(2), VOCAB_2)


def test_a_block_by_hand() -> None:
    """One rank, F 0-1 and B 1-3: S at 1, C1 hidden in one interval, T and B after it."""
    block = with_vocabulary(Block(((Slot(0, 1, "F"), Slot(1, 2, "B")),), ((0, 0),), 3), VOCAB_2)
    assert {slot.kind: slot.start for slot in block.rows[0]} == {
        "F": 0, "B": 4, "S": 1, "T": 4, "IF": -3, "IB": 9
    }  # fmt: skip
    row = unroll(block, 2).rows[0]
    assert " ".join(map(str, row)) == "IF0 IF1 F0 S0 F1 T0 S1 B0 T1 B1 IB0 IB1"
