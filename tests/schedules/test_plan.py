"""A plan has a text form that can be saved, edited and loaded; evaluation keeps its forwards."""

from dataclasses import replace

import pytest
from harness.properties import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules import by_hand
from schedules.cases import (
    BARRIERS,
    Case,
    blocks,
    cases,
    looking_ahead,
    random_costs,
    seeds,
)

from megatron.schedules.blocks.block import Block, unroll
from megatron.schedules.check import check
from megatron.schedules.plan import Plan, evaluation_plan

TEXT = """\
microbatches 1
stages 0.0 1.0
vocabulary none
0: F0 B0
1: F0 B0
"""


anything = cases(vocabulary=st.sampled_from([*BARRIERS]), passes=100)


@settings(max_examples=examples(60))
@given(anything, st.booleans(), st.integers(-1, 9))
def test_text_round_trip(case: Case, evaluate: bool, ahead: int) -> None:
    plan = looking_ahead(case.plan, ahead)
    plan = evaluation_plan(plan) if evaluate else plan
    assert Plan.from_text(plan.to_text()) == plan


@given(blocks(), st.integers(1, 5))
def test_text_round_trip_of_any_stages(block: Block, microbatches: int) -> None:
    plan = unroll(block, microbatches)
    assert Plan.from_text(plan.to_text()) == plan


def test_comments_and_blank_lines_are_skipped() -> None:
    text = "# by hand\n\n" + TEXT.replace("1: F0", "1: F0 # the last stage\n#").replace("# B0", "")
    assert Plan.from_text(TEXT.replace("none\n", "none # whole\n\n# rows\n")) == Plan.from_text(
        TEXT
    )
    assert Plan.from_text(text).rows[1] == Plan.from_text(TEXT).rows[1][:1]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("1: F0 B0", "1: F0 Q0", "line 5: 'Q0' is no pass"),
        ("1: F0 B0", "1: F0 S0.1", "line 5: 'S0.1' names a chunk"),
        ("1: F0 B0", "2: F0 B0", "line 5: expected the row of rank 1, got '2:'"),
        ("0: F0 B0\n", "", "line 4: expected the row of rank 0, got '1:'"),
        (
            "microbatches 1\n",
            "",
            "a plan begins with its microbatches: add lines like 'microbatches 4'",
        ),
        ("microbatches 1", "microbatches one", "line 1: 'microbatches one' cannot be read"),
        ("stages 0.0 1.0", "stages 0 1", "line 2: 'stages 0 1' cannot be read"),
        ("vocabulary none", "vocabulary some", "line 3: 'vocabulary some' cannot be read"),
        ("vocabulary none", "vocabulary redis", "'vocabulary NAME' with one of none, naive, vocab"),
        ("0: F0", "forward onyl\n0: F0", "line 4: 'forward onyl' cannot be read"),
        ("0: F0", "vocabulary none\n0: F0", "line 4: 'vocabulary' stands there twice"),
        ("0: F0", "nonsense\n0: F0", "line 4: 'nonsense' is no header line"),
        ("vocabulary none", "collectives slow", "line 3: 'collectives slow' cannot be read"),
        (
            "vocabulary none\n",
            "",
            "a plan begins with its vocabulary: add lines like 'vocabulary vocab-2'",
        ),
        ("0: F0", "looks ahead 1.0\n0: F0", "'looks ahead 1.0' cannot be read"),
        ("vocabulary none\n", "collectives synchronous\n", "'collectives synchronous' is no tr"),
        ("0: F0", "barriers none\n0: F0", "'barriers none' says again what 'vocabulary none' says"),
        ("vocabulary none", "barriers 4", "'barriers 4' is no treatment of the vocabulary: write"),
        (
            "vocabulary none",
            "barriers 1\ncollectives synchronous",
            "'barriers 1, collectives synchronous' is no treatment",
        ),
    ],
)
def test_a_line_that_cannot_be_read_is_named(old: str, new: str, message: str) -> None:
    assert old in TEXT
    with pytest.raises(ValueError, match=message):
        Plan.from_text(TEXT.replace(old, new))


@pytest.mark.parametrize(("line", "stage"), [("", 1), (" 0", 0), (" 1", 1)])
def test_the_stage_that_looks_ahead_is_the_last_one_without_a_number(line: str, stage: int) -> None:
    text = TEXT.replace("0: F0", f"looks ahead{line}\n0: F0")
    assert Plan.from_text(text) == replace(Plan.from_text(TEXT), ahead_stage=stage)


@pytest.mark.parametrize(
    ("old", "name"),
    [
        ("barriers none", "none"),
        ("barriers 1", "vocab-2"),
        ("barriers 2", "vocab-1"),
        ("barriers 3", "naive"),
        ("barriers 2\ncollectives synchronous", "interlaced"),
    ],
)
def test_files_of_old_count_barriers(old: str, name: str) -> None:
    new = TEXT.replace("none", name)
    assert Plan.from_text(TEXT.replace("vocabulary none", old)) == Plan.from_text(new)


@settings(max_examples=examples(40))
@given(anything, seeds)
def test_evaluation_is_a_plan_of_its_own(case: Case, seed: int) -> None:
    plan = evaluation_plan(case.plan)
    check(plan)
    assert by_hand.end_times(plan, random_costs(seed, case.ranks, case.chunks))
    kinds = {p.kind for row in plan.rows for p in row}
    assert kinds == {"F", *case.treatment.passes} - {"IB"}
    assert plan.treatment == case.plan.treatment


@settings(max_examples=examples(20))
@given(anything)
def test_evaluation_keeps_the_order_of_what_it_keeps(case: Case) -> None:
    for all_passes, kept in zip(case.plan.rows, evaluation_plan(case.plan).rows, strict=True):
        assert list(kept) == [p for p in all_passes if p in set(kept)]
