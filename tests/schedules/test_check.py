"""A plan that cannot run is refused, with the rank, the pass and the place in the grid."""

from dataclasses import replace

import pytest
from harness.properties import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from schedules.cases import BARRIERS, Case, cases

from megatron.schedules.check import check, grid
from megatron.schedules.held import Held, in_flight, peak_held
from megatron.schedules.plan import Plan, evaluation_plan

TEXT = """\
microbatches 2
stages 0.0 1.0
vocabulary none
0: F0 F1 B0 B1
1: F0 B0 F1 B1
"""
VOCABULARY = """\
microbatches 1
stages 0.0 1.0
vocabulary vocab-2
0: IF0 F0 S0 T0 B0 IB0
1: IF0 F0 S0 T0 B0 IB0
"""


def complaint(text: str) -> str:
    with pytest.raises(ValueError, match=r".+") as caught:
        check(Plan.from_text(text))
    return str(caught.value)


def test_the_plans_below_are_sound_before_they_are_spoilt() -> None:
    check(Plan.from_text(TEXT))
    check(Plan.from_text(VOCABULARY))


@pytest.mark.parametrize(
    ("text", "old", "new", "first_line", "marked"),
    [
        (TEXT, "F1 B1\n", "F1\n", "rank 1 never runs B1", "rank 1: F0 B0 F1 > <"),
        (TEXT, "F1 B0 B1", "F1 B0 B0 B1", "rank 0 runs B0 twice", "F0 F1 B0 >B0< B1"),
        (TEXT, "F1 B0 B1", "F1 F2 B0 B1", "rank 0 cannot run F2", "F0 F1 >F2< B0 B1"),
        (TEXT, "F1 B0 B1", "F1 B0.1 B1", "rank 0 cannot run B0.1", "F0 F1 >B0.1< B1"),
        (TEXT, "F1 B0 B1", "F1 S0 B0 B1", "rank 0 cannot run S0", "F0 F1 >S0< B0 B1"),
        (TEXT, "1: F0 B0", "1: F0 W0 B0", "rank 1 cannot run W0", "rank 1: F0 >W0< B0"),
        (VOCABULARY, "T0 B0 IB0\n1", "B0 IB0\n1", "rank 0 never runs T0", "B0 IB0 > <"),
        (VOCABULARY, "1: IF0 ", "1: ", "rank 1 never runs IF0", "rank 1: F0 S0"),
    ],
)
def test_every_pass_exactly_once(
    text: str, old: str, new: str, first_line: str, marked: str
) -> None:
    assert old in text
    message = complaint(text.replace(old, new))
    assert message.splitlines()[0] == first_line
    assert marked in message
    assert message.count(">") == message.count("<") == 1


def test_a_long_list_of_missing_passes_is_cut() -> None:
    text = "microbatches 9\nstages 0.0\nvocabulary none\n0: F0\n"
    assert complaint(text).splitlines()[0] == "rank 0 never runs B0 B1 F1 B2 F2 B3 F3 B4 ..."


@pytest.mark.parametrize(
    ("text", "old", "new", "reasons", "marked"),
    [
        (TEXT, "F0 B0 F1 B1", "B0 F0 F1 B1", ["rank 1 waits at B0 for F0"], [">B0< F0"]),
        (
            TEXT,
            "F0 F1 B0 B1",
            "F0 B0 B1 F1",
            ["rank 0 waits at B1 for F1", "rank 1 waits at F1 for X1 from 0"],
            ["F0 B0 >B1< F1", "F0 B0 >F1< B1"],
        ),
        (
            VOCABULARY,
            "F0 S0 T0 B0 IB0\n1",
            "F0 T0 S0 B0 IB0\n1",
            ["rank 0 waits at T0 for S0, C1 0", "rank 1 waits at T0 for C1 0"],
            ["F0 >T0< S0", "S0 >T0< B0"],
        ),
    ],
)
def test_a_deadlock_names_who_waits_for_what(
    text: str, old: str, new: str, reasons: list[str], marked: list[str]
) -> None:
    assert old in text
    message = complaint(text.replace(old, new))
    assert message.startswith("the plan deadlocks: ")
    for part in reasons + marked:
        assert part in message


def test_numbers_that_promise_endless_work_are_refused_at_once() -> None:
    many = TEXT.replace("microbatches 2", "microbatches 1000000000")
    assert complaint(many).splitlines()[0] == "rank 0 never runs B2 F2 B3 F3 B4 F4 B5 F5 ..."
    assert "0.1000000000 do not name every" in complaint(TEXT.replace("1.0", "0.1000000000"))


@pytest.mark.parametrize("stages", ["0.0", "0.0 0.0", "0.0 2.0", "0.0 1.1", "0.0 1.0 1.0"])
def test_stages_name_every_rank_and_chunk_once(stages: str) -> None:
    message = complaint(TEXT.replace("stages 0.0 1.0", f"stages {stages}"))
    assert "do not name every (rank, chunk) of 2 ranks" in message


def test_a_stage_that_looks_ahead_is_one_of_the_plan() -> None:
    plan = Plan.from_text(VOCABULARY)
    check(replace(plan, ahead_stage=0))
    with pytest.raises(ValueError, match="'looks ahead 2' names none of the stages 0 to 1: lower"):
        check(replace(plan, ahead_stage=2))


def test_a_broken_promise_of_memory_names_rank_and_both_numbers() -> None:
    plan = Plan.from_text(TEXT)
    check(plan, in_flight_limit=[2, 1])
    with pytest.raises(ValueError, match=r"rank 0 holds up to 2 microbatches, .* promises 1"):
        check(plan, in_flight_limit=[1, 1])


def test_activations_are_held_until_the_weight_gradient_and_by_chunk() -> None:
    plan = Plan.from_text(
        "microbatches 2\nstages 0.0 0.1\nvocabulary none\n"
        "0: F0 F0.1 B0.1 F1 W0.1 B0 W0 F1.1 B1.1 B1 W1 W1.1\n"
    )
    check(plan)
    assert in_flight(plan) == [1.5]
    unsplit = "microbatches 1\nstages 0.0 0.1\nvocabulary none\n0: F0 F0.1 B0.1 B0\n"
    assert in_flight(Plan.from_text(unsplit)) == [1.0]


def test_exponentials_and_embeddings_held() -> None:
    plan = Plan.from_text(
        "microbatches 2\nstages 0.0\nvocabulary vocab-1\n"
        "0: IF0 F0 IF1 F1 S0 S1 T0 T1 B0 B1 IB0 IB1\n"
    )
    check(plan)
    assert peak_held(plan, plan.rows[0]) == Held(2, 2, 1, gradients=2)


@settings(max_examples=examples(20))
@given(cases(vocabulary=st.sampled_from([*BARRIERS]), passes=40), st.booleans(), st.data())
def test_any_pass_left_out_or_doubled_is_found(
    case: Case, evaluate: bool, data: st.DataObject
) -> None:
    plan = evaluation_plan(case.plan) if evaluate else case.plan
    rank = data.draw(st.integers(0, plan.ranks - 1))
    at = data.draw(st.integers(0, len(plan.rows[rank]) - 1))
    item = plan.rows[rank][at]
    # If the only W, or R, of a rank is gone, the plan is one that has none.
    assume(item.kind not in ("W", "R") or plan.microbatches * plan.chunks > 1)
    for times, verb in ((0, "never runs"), (2, "runs")):
        row = (*plan.rows[rank][:at], *(item,) * times, *plan.rows[rank][at + 1 :])
        rows = (*plan.rows[:rank], row, *plan.rows[rank + 1 :])
        spoilt = replace(plan, rows=rows)
        with pytest.raises(ValueError, match=f"^rank {rank} {verb} {item}"):
            check(spoilt)


def test_the_grid_is_cut_around_the_mark() -> None:
    row = " ".join(f"F{i}" for i in range(40))
    plan = Plan.from_text(
        f"microbatches 40\nstages 0.0 1.0\nvocabulary none\nforward only\n0: {row}\n1: {row}\n"
    )
    assert grid(plan, {1: 20}, around=2).splitlines() == [
        "  rank 0: ... F18 F19 F20 F21 F22 ...",
        "  rank 1: ... F18 F19 >F20< F21 F22 ...",
    ]
    assert grid(plan, {0: 40}, around=1).splitlines()[0] == "  rank 0: ... F39 > <"


def test_no_microbatch_is_no_plan() -> None:
    text = "microbatches 0\nstages 0.0\nvocabulary none\n0:\n"
    with pytest.raises(ValueError, match="at least 1 microbatch, this one has 0"):
        check(Plan.from_text(text))
