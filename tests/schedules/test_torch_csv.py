"""Plans go to PyTorch's form and come back; what it has no form for is refused."""

import re
from collections.abc import Sequence
from contextlib import suppress

import pytest
from harness.properties import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules.cases import BARRIERS, Case, cases

from megatron.schedules.check import check
from megatron.schedules.make_plan import make_plan
from megatron.schedules.plan import Plan, evaluation_plan
from megatron.schedules.torch_csv import from_torch_csv, to_torch_csv, torchtitan_schedule

WHOLE = cases(vocabulary=st.just("none"), passes=40).map(lambda case: case._replace(ahead=None))


@settings(max_examples=examples(60))
@given(WHOLE)
def test_round_trip(case: Case) -> None:
    assert from_torch_csv(to_torch_csv(case.plan)) == case.plan


def test_the_text_of_a_plan_that_splits_the_backward() -> None:
    plan = Plan.from_text(
        "microbatches 1\nstages 0.0 0.1\nvocabulary none\n0: F0 F0.1 B0.1 B0 W0.1 W0\n"
    )
    assert to_torch_csv(plan) == "0F0,1F0,1I0,0I0,1W0,0W0\n"


def test_the_text_of_1f1b() -> None:
    plan = make_plan("1f1b", "none", 2, 3, shortened=False)
    assert to_torch_csv(plan) == "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"


@pytest.mark.parametrize("vocabulary", [name for name, number in BARRIERS.items() if number])
def test_a_split_vocabulary_has_no_form(vocabulary: str) -> None:
    plan = make_plan("1f1b", vocabulary, 2, 2)
    with pytest.raises(ValueError, match=f"treatment {vocabulary}: .*make the plan with 'none'"):
        to_torch_csv(plan)


def test_an_evaluation_has_no_form() -> None:
    with pytest.raises(ValueError, match="PyTorch wants a backward for every forward"):
        to_torch_csv(evaluation_plan(make_plan("1f1b", "none", 2, 2)))


def test_passes_that_compute_again_are_refused() -> None:
    plan = make_plan("1f1b", "none", 2, 3, recompute_ahead=1)
    with pytest.raises(ValueError, match="without --recompute-ahead"):
        to_torch_csv(plan)


def test_slices_are_refused() -> None:
    plan = make_plan("1f1b", "none", 2, 3, slices=2)
    with pytest.raises(ValueError, match="into 2 slices: PyTorch's form has no slices"):
        to_torch_csv(plan)


def test_losses_out_of_order_are_refused() -> None:
    plan = Plan.from_text(
        "microbatches 2\nstages 0.0 1.0\nvocabulary none\n0: F1 F0 B1 B0\n1: F1 B1 F0 B0\n"
    )
    with pytest.raises(ValueError, match=re.escape("in the order [1, 0]")):
        to_torch_csv(plan)


def test_what_does_not_compute_is_skipped() -> None:
    plain = from_torch_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    padded = (
        "0F0,0SEND_F0,0F1,,,0RECV_B0,0B0,0B1,0REDUCE_GRAD\n1UNSHARD,1F0, 1B0,1F1,1B1,1RESHARD\n"
    )
    assert from_torch_csv(padded) == plain


@pytest.mark.parametrize("pair", ["0F1;0B0", "0B0; 0F1"])
def test_overlapped_actions_are_a_pair(pair: str) -> None:
    assert from_torch_csv(f"0F0,({pair})OVERLAP_F_B,0B1\n").row_text(0) == "F0 F1|B0 B1"


def test_a_whole_backward_of_a_pair_is_split_after_it() -> None:
    plan = from_torch_csv("0F0,(0F1;0B0)OVERLAP_F_B,0I1,0W1\n")
    assert plan.row_text(0) == "F0 F1|B0 W0 B1 W1"
    assert to_torch_csv(plan) == "0F0,(0F1;0I0)OVERLAP_F_B,0W0,0I1,0W1\n"


def test_overlapped_actions_that_are_no_pair_stand_in_a_row() -> None:
    assert from_torch_csv("0F0,(0F1)OVERLAP_F_B,(0B0;0B1)OVERLAP_F_B\n").row_text(0) == (
        "F0 F1 B0 B1"
    )


def test_one_split_backward_splits_all() -> None:
    plan = from_torch_csv("0F0,0F1,0I0,0W0,0B1\n")
    assert [str(item) for item in plan.rows[0]] == ["F0", "F1", "B0", "W0", "B1", "W1"]


def test_chunks_are_numbered_in_the_order_of_their_stages() -> None:
    plan = from_torch_csv("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n")
    assert plan.stages == ((0, 0), (1, 0), (1, 1), (0, 1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file has no actions"),
        ("\n,,\n", "the file has no actions"),
        ("0F0,0Q0\n", "row 0: '0Q0' is no action"),
        ("0F0,0B\n", "row 0: '0B' is no action"),
        ("0F0,0B0\n0F1,0B1\n", "row 1: 0F1 is of a stage that rank 0 has"),
        ("0F0,0B0\n2F0,2B0\n", "no row has stage 1, but one has stage 2"),
        ("0F0,0B0,0B0\n", "rank 0 runs B0 twice"),
        ("0F0,0F1,0B0\n", "rank 0 never runs B1"),
        ("0B0,0F0\n", "the plan deadlocks: rank 0 waits at B0 for F0"),
    ],
)
def test_what_is_no_plan_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        from_torch_csv(text)


@settings(max_examples=examples(100))
@given(WHOLE, st.data())
def test_a_damaged_file_is_a_plan_or_one_clear_error(case: Case, data: st.DataObject) -> None:
    text = to_torch_csv(case.plan)
    at = data.draw(st.integers(0, len(text)))
    damage = data.draw(st.text('0123FIWB,;()\n "x', max_size=4))
    end = data.draw(st.integers(at, min(len(text), at + 4)))
    with suppress(ValueError):
        plan = from_torch_csv(text[:at] + damage + text[end:])
        check(plan)


@pytest.mark.parametrize(
    ("schedule", "chunks", "name"),
    [
        ("1f1b", None, "1F1B"),
        ("zb-2p", None, "1F1B"),
        ("interleaved", 3, "Interleaved1F1B"),
        ("v-half", None, "ZBVZeroBubble"),
        ("hanayo", 2, "ZBVZeroBubble"),
    ],
)
def test_torchtitan_places_stages_by_a_schedule(
    schedule: str, chunks: int | None, name: str
) -> None:
    assert torchtitan_schedule(make_plan(schedule, "none", 4, 4, chunks=chunks)) == name


def test_torchtitan_has_no_double_wave() -> None:
    plan = make_plan("hanayo", "none", 2, 2, chunks=4)
    assert _ranks(plan) == [0, 1, 1, 0, 0, 1, 1, 0]
    with pytest.raises(ValueError, match="the ranks 0 1 1 0 0 1 1 0: torchtitan places stages in"):
        torchtitan_schedule(plan)


def _ranks(plan: Plan) -> Sequence[int]:
    return [rank for rank, _ in plan.stages]
