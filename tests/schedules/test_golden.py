"""Rows of every schedule, in text files for p = 4 and m = 8 and by hand where literature has them.

Plans are in the order of their block, before costs have moved anything. The files were looked over
by eye when made; a change of any pass should be looked over again.
"""

from pathlib import Path

import pytest
from harness.properties import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules import by_hand
from schedules.cases import DRAWN, UNGROUPED, V_SHAPED

from megatron.schedules.block_options import BlockOptions
from megatron.schedules.make_plan import make_plan
from megatron.schedules.plan import Plan

GOLDEN = Path(__file__).parent / "golden"
FILES = sorted(path.name for path in GOLDEN.iterdir())


def rows(plan: Plan) -> list[list[str]]:
    return [list(map(str, row)) for row in plan.rows]


def in_block_order(schedule: str, p: int, m: int, chunks: int | None = None) -> Plan:
    return make_plan(schedule, "none", p, m, chunks=chunks, shortened=False)


@pytest.mark.parametrize("name", FILES)
def test_plan_of_four_ranks_and_eight_microbatches(name: str) -> None:
    schedule, vocabulary, *_ = name.split("_")
    plan = make_plan(schedule, vocabulary, 4, 8, shortened=False)
    assert plan.to_text() == (GOLDEN / name).read_text()


def test_every_block_has_its_files() -> None:
    for vocabulary in ("none", "vocab-2"):
        assert {f"{name}_{vocabulary}_p4_m8.txt" for name in DRAWN} <= {*FILES}


@pytest.mark.parametrize(("searched", "block"), [("zb-1p", "zb-h1"), ("zb-2p", "zb-h2")])
def test_a_search_starts_from_a_block_with_its_own_files(searched: str, block: str) -> None:
    assert in_block_order(searched, 4, 8) == in_block_order(block, 4, 8)


@given(st.integers(1, 16), st.integers(1, 40))
def test_gpipe(p: int, m: int) -> None:
    assert rows(in_block_order("gpipe", p, m)) == [by_hand.gpipe_row(m)] * p


@given(st.integers(1, 16), st.integers(1, 40))
def test_1f1b_is_that_of_megatron(p: int, m: int) -> None:
    expected = [by_hand.one_f_one_b_row(p, rank, m) for rank in range(p)]
    assert rows(in_block_order("1f1b", p, m)) == expected


@given(st.integers(1, 16), st.integers(1, 40))
def test_zb_h1(p: int, m: int) -> None:
    expected = [by_hand.zb_h1_row(p, rank, m) for rank in range(p)]
    assert rows(in_block_order("zb-h1", p, m)) == expected


@given(st.integers(1, 16), st.integers(1, 40))
def test_forwards_before_the_first_backward_of_zb_h2(p: int, m: int) -> None:
    """Rank i starts with 2 (p - i) - 1 of them (arXiv 2401.10241, section 2.2.2 and figure 3)."""
    for rank, row in enumerate(rows(in_block_order("zb-h2", p, m))):
        assert row.index("B0") == min(m, 2 * (p - rank) - 1)


@settings(max_examples=examples(60))
@given(st.integers(1, 10), st.integers(1, 4), st.integers(2, 4))
def test_interleaved_is_that_of_megatron(p: int, groups: int, v: int) -> None:
    """Down to the warm-up counts, where microbatches are a multiple of ranks as Megatron asks."""
    expected = [by_hand.interleaved_row(p, rank, groups * p, v) for rank in range(p)]
    assert rows(in_block_order("interleaved", p, groups * p, v)) == expected


@settings(max_examples=examples(60))
@given(st.data(), st.integers(1, 8), st.integers(2, 4), st.integers(1, 3))
def test_interleaved_in_larger_groups_is_that_of_megatron(
    data: st.DataObject, p: int, v: int, full: int
) -> None:
    """Also where the last group is smaller than the others, but not smaller than the pipeline."""
    size = data.draw(st.integers(p, 3 * p))
    m = full * size + data.draw(st.just(0) | st.integers(p, size))
    plan = make_plan(
        "interleaved", "none", p, m, chunks=v, options=BlockOptions.of(group=size), shortened=False
    )
    assert rows(plan) == [by_hand.interleaved_row(p, rank, m, v, size) for rank in range(p)]


@settings(max_examples=examples(30))
@given(st.integers(2, 16))
def test_v_shapes_alternate_the_chunks_at_the_turn(p: int) -> None:
    """On the last rank chunk 1 follows chunk 0 at once, and its backwards likewise.

    DualPipeV leaves room for a B between the two.
    """
    for schedule in {*V_SHAPED} & {*UNGROUPED} - {"dualpipe-v"}:
        plan = in_block_order(schedule, p, 2 * p)
        assert plan.stages == (*((i, 0) for i in range(p)), *((i, 1) for i in reversed(range(p))))
        row = rows(plan)[-1]
        for i in range(2 * p):
            assert row.index(f"F{i}.1") == row.index(f"F{i}") + 1
