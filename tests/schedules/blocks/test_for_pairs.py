"""Blocks stretched for pairs: every F has its B, results come with the pair, memory as promised."""

from itertools import pairwise

import pytest
from harness.marks import full
from schedules.cases import expected_passes

from megatron.schedules.blocks.block import Block, unroll
from megatron.schedules.blocks.for_pairs import NoRoomError, for_pairs
from megatron.schedules.blocks.with_vocabulary import with_vocabulary
from megatron.schedules.catalogue import SCHEDULES
from megatron.schedules.check import check
from megatron.schedules.costs import Costs
from megatron.schedules.held import in_flight
from megatron.schedules.make_plan import make_plan
from megatron.schedules.pairs import joined
from megatron.schedules.passes import PassKind
from megatron.schedules.timing import earliest
from megatron.schedules.treatments import TREATMENTS

BLOCKS = [
    (full if p in (3, 8) else pytest.param)(name, p) for name in SCHEDULES for p in (1, 2, 3, 5, 8)
]


def block_of(name: str, ranks: int, microbatches: int = 16) -> Block:
    schedule = SCHEDULES[name]
    return schedule.block(ranks, microbatches, schedule.chunks)


@pytest.mark.parametrize(("name", "ranks"), BLOCKS)
def test_every_forward_has_the_backward_of_another_microbatch_behind_it(
    name: str, ranks: int
) -> None:
    block = for_pairs(block_of(name, ranks))
    for row in block.rows:
        backwards = {
            (slot.start + i * block.interval) % block.period
            for slot in row
            for i in range(max(block.group, 1))
            if slot.kind == "B"
        }
        assert all(slot.end % block.period in backwards for slot in row if slot.kind == "F")
    last = len(block.stages) - 1
    assert block.slot(last, "B").start > block.slot(last, "F").end


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", [name for name, own in SCHEDULES.items() if own.takes_chunks])
def test_a_search_for_room_ends_with_any_number_of_chunks(name: str, ranks: int) -> None:
    """GIS with three chunks has no room in any period; the search for it once had no end."""
    schedule, without = SCHEDULES[name], []
    for chunks in range(schedule.chunks, 9, schedule.chunk_step):
        block = schedule.block(ranks, 16, chunks)
        try:
            stretched = for_pairs(block)
        except NoRoomError:
            without.append(chunks)
        else:
            assert len(stretched.rows) == ranks
            assert stretched.has_pairs
    assert bool(without) == (name == "gis" or (name, ranks > 2) == ("gis-h", True))


def test_a_schedule_without_room_for_more_pairs_is_planned() -> None:
    waiting = Costs({"F": 2.0, "B": 2.0, "W": 1.0}, waits={"F": 1.0, "B": 1.0})
    plan = make_plan("gis", "none", 2, 8, waiting, chunks=3, joined=True)
    check(plan)
    assert plan.chunks == 3


@pytest.mark.parametrize(("name", "ranks"), BLOCKS)
def test_a_stage_follows_when_the_pair_before_has_ended(name: str, ranks: int) -> None:
    block = for_pairs(block_of(name, ranks))
    pair = block.slot(0, "F").duration + block.slot(0, "B").duration
    kinds: tuple[PassKind, PassKind] = ("F", "B")
    starts = {
        kind: [block.slot(stage, kind).start for stage in range(len(block.stages))]
        for kind in kinds
    }
    assert all(later - sooner >= pair for sooner, later in pairwise(starts["F"]))
    assert all(sooner - later >= pair for sooner, later in pairwise(starts["B"]))


@pytest.mark.parametrize(("name", "ranks"), BLOCKS)
def test_its_plan_runs_with_any_vocabulary(name: str, ranks: int) -> None:
    stretched = for_pairs(block_of(name, ranks))
    for treatment in ("vocab-1", "vocab-2"):
        plan = unroll(with_vocabulary(stretched, TREATMENTS[treatment]), 2 * ranks + 1)
        check(plan)
        for rank, row in enumerate(plan.rows):
            assert sorted(row) == sorted(expected_passes(plan, rank))


@pytest.mark.parametrize("ranks", [2, full(4), 5])
def test_what_it_holds(ranks: int) -> None:
    """One chunk a rank: 2p, for two pairs a stage. Chunks by turns: one chunk more than before."""

    def held(name: str) -> float:
        return max(in_flight(unroll(for_pairs(block_of(name, ranks, 64)), 64)))

    assert held("1f1b") == held("zb-h1") == held("zb-h2") == 2 * ranks
    assert held("interleaved") == max(in_flight(unroll(block_of("interleaved", ranks), 64))) + 0.5
    assert held("hanayo") == max(in_flight(unroll(block_of("hanayo", ranks), 64))) + 0.5
    assert held("zb-v") <= ranks + 1
    assert held("dualpipe-v") == ranks + 0.5


@pytest.mark.parametrize("ranks", [4, full(8)])
@pytest.mark.parametrize("treatment", ["vocab-1", "vocab-2"])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-h2"])
def test_a_further_microbatch_takes_no_more_than_its_work(
    name: str, treatment: str, ranks: int
) -> None:
    """No rank waits in the steady state, also where W is short and a pair long beside the block."""
    costs = Costs(
        {"F": 17.0, "B": 22.0, "W": 5.0, "S": 4.0, "T": 3.0, "IF": 0.0, "IB": 0.0},
        waits={"F": 4.0, "B": 4.0},
    )
    block = with_vocabulary(for_pairs(block_of(name, ranks)), TREATMENTS[treatment])
    few, more = 6 * ranks, 7 * ranks
    ends = [earliest(joined(unroll(block, m), costs), costs).end for m in (few, more)]
    pair = (17.0 - 4.0) + (22.0 - 4.0)  # each works longer than the other one waits
    # Of the whole backward of 1f1b, W waits for no exchange.
    assert ends[1] - ends[0] == pytest.approx((more - few) * (pair + 5.0 + 4.0 + 3.0))


def test_a_block_with_vocabulary_passes_is_refused() -> None:
    with pytest.raises(ValueError, match="stretch it before they are inserted"):
        for_pairs(with_vocabulary(block_of("1f1b", 2), TREATMENTS["vocab-2"]))
