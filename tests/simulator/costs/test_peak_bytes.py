"""Peaks in bytes: against a walk over the row by hand, and against counts of what is held."""

import re
from dataclasses import replace

import pytest
from harness.properties import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.schedules.held import in_flight
from megatron.schedules.lower import Instruction, Program, Run, Start, Wait
from megatron.schedules.make_plan import make_plan
from megatron.schedules.needs import Comm
from megatron.schedules.passes import Pass, PassKind
from megatron.schedules.plan import Plan
from megatron.simulator.costs.peak_bytes import Sizes, held_bytes, peak_bytes

ONE_RANK = """microbatches 2
stages 0.0
vocabulary vocab-2
0: IF0 IF1 F0 S0 F1 S1 T0 B0 T1 B1 IB0 IB1
"""


def test_a_running_peak_by_hand() -> None:
    """At S1: both activations, both exponentials and no embedding; at F0: two of the latter."""
    plan = Plan.from_text(ONE_RANK)
    assert peak_bytes(plan, Sizes(static=1000, activation=100, exponentials=10)) == [1220]
    assert peak_bytes(plan, Sizes(1000, 100, 10, embedding=1)) == [1220]
    assert peak_bytes(plan, Sizes(1000, 100, 10, embedding=300)) == [1700]


def test_parts_of_embeddings_are_held_until_the_rank_waits_for_their_sum() -> None:
    """A rank that looks three microbatches up holds three parts; the fourth takes no more."""
    plan = make_plan("1f1b", "vocab-2", 2, 4)
    wait, first = Wait(Comm("CIF", 0)), [Run(Pass("IF", i)) for i in range(3)]
    row: tuple[Instruction, ...] = (*first, wait, Run(Pass("IF", 3)), Run(Pass("F", 0)))
    sizes = Sizes(static=1000, activation=7, partial=100)
    assert peak_bytes(Program(plan, ((), row)), sizes) == [1000, 1307]
    assert peak_bytes(plan, sizes) == peak_bytes(plan, Sizes(static=1000, activation=7))


def test_weight_gradients_hold_what_they_need() -> None:
    text = "microbatches 2\nstages 0.0\nvocabulary none\n0: F0 B0 F1 B1 {}\n"
    assert peak_bytes(Plan.from_text(text.format("")), Sizes(activation=5)) == [5]
    assert peak_bytes(Plan.from_text(text.format("W0 W1")), Sizes(activation=5)) == [10]


def test_what_b_computes_again_lives_until_w() -> None:
    """At B1: the factors of both; at F1: the factors of the first, and what F1 keeps."""
    text = "microbatches 2\nstages 0.0\nvocabulary none\n0: F0 B0 F1 {} W1\n"
    sizes = Sizes(activation=5, factors=30)
    assert peak_bytes(Plan.from_text(text.format("B1 W0")), sizes) == [60]
    assert peak_bytes(Plan.from_text(text.format("W0 B1")), sizes) == [35]
    joined = Plan.from_text("microbatches 2\nstages 0.0\nvocabulary none\n0: F0 F1 B0 B1\n")
    assert peak_bytes(joined, sizes) == [10]


def test_what_r_computes_again_lives_until_b() -> None:
    """At R1: what both F keep, and two chunks computed again, or one if R0 was used by then."""
    text = "microbatches 2\nstages 0.0\nvocabulary none\n0: F0 F1 {}\n"
    sizes = Sizes(activation=5, repeated=30, factors=20)
    assert peak_bytes(Plan.from_text(text.format("R0 R1 B0 B1")), sizes) == [70]
    assert peak_bytes(Plan.from_text(text.format("R0 B0 R1 B1")), sizes) == [40]
    assert peak_bytes(Plan.from_text(text.format("R0 B0 R1 B1 W0 W1")), sizes) == [55]
    assert peak_bytes(Plan.from_text(text.format("R0 B0 W0 R1 B1 W1")), sizes) == [40]


@settings(max_examples=examples(20))
@given(
    schedule=st.sampled_from(["gpipe", "1f1b", "zb-h1", "zb-v", "v-half"]),
    vocabulary=st.sampled_from(["none", "vocab-1", "vocab-2"]),
    p=st.integers(1, 5),
    m=st.integers(1, 8),
)
def test_with_activations_alone_it_is_what_is_in_flight(
    schedule: str, vocabulary: str, p: int, m: int
) -> None:
    plan = make_plan(schedule, vocabulary, p, m)
    per_rank = [float(rank + 1) for rank in range(p)]
    found = peak_bytes(plan, Sizes(static=0.5, activation=per_rank))
    held = in_flight(plan)
    assert found == [0.5 + held[r] * plan.chunks * per_rank[r] for r in range(p)]


def test_sizes_by_chunk() -> None:
    """Rank 0 of a V of two ranks runs the first and the last stage."""
    plan = make_plan("zb-v", "none", 2, 1)
    assert peak_bytes(plan, Sizes(activation=[[1, 20], [300, 4000]])) == [21, 4300]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"static": [1, 2, 3]}, "static has 3 sizes for 2 ranks"),
        ({"activation": [[1], [2]]}, "activation has 1 size for 2 chunks"),
        ({"static": -1.0}, "static=-1 is no size"),
        ({"embedding": [1.0, float("nan")]}, "embedding=nan is no size"),
        ({"exponentials": float("inf")}, "exponentials=inf is no size"),
    ],
)
def test_impossible_sizes_are_refused(sizes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        peak_bytes(make_plan("zb-v", "none", 2, 1), Sizes(**sizes))  # type: ignore[arg-type]


def test_a_pass_works_with_more_than_it_leaves() -> None:
    """Only while it runs: S1 comes when most is held, T0 when less is."""
    plan = Plan.from_text(ONE_RANK)
    sizes = Sizes(static=1000, activation=100, exponentials=10)
    assert peak_bytes(plan, replace(sizes, working={"S": 7, "T": 5})) == [1227]
    assert peak_bytes(plan, replace(sizes, working={"IB": 30})) == [1220]
    by_chunk = Sizes(activation=[[1, 20], [300, 4000]], working={"B": [[0, 5], [0, 0]]})
    assert peak_bytes(make_plan("zb-v", "none", 2, 1), by_chunk) == [26, 4300]


def test_what_comes_and_goes_with_collectives_is_held_in_between() -> None:
    """The last rank has outputs from F to S and gradients from S to B; the first receives them.

    What it looked up has its gradient there from its own B to IB, and comes to the last with CIB.
    """
    plan = make_plan("1f1b", "vocab-2", 2, 1)
    passes = {kind: Run(Pass(kind, 0)) for kind in ("IF", "F", "S", "T", "B", "IB")}
    c0, cib = Start(Comm("C0", 0)), Start(Comm("CIB", 0))
    first = (passes["F"], c0, passes["S"], passes["T"], passes["B"], cib, passes["IB"])
    last = (passes["F"], c0, passes["S"], passes["B"], passes["T"], cib, passes["IB"])
    sizes = Sizes(output=1, gradient=[0, 10], looked_up=100)
    program = Program(plan, (first, last))
    held = [[after for _, after in held_bytes(program, sizes, rank)] for rank in range(2)]
    assert held == [[0, 0, 0, 100, 0], [1, 10, 0, 0, 0]]
    assert [during for during, _ in held_bytes(program, sizes, 1)] == [1, 11, 10, 0, 100]


def test_parts_of_the_gradient_wait_for_their_barrier() -> None:
    """T forms them under Algorithm 1, and C2 adds them up; the last rank keeps the sum for B."""
    plan = make_plan("1f1b", "vocab-1", 2, 1)
    done = Wait(Comm("C2", 0))
    kinds: tuple[PassKind, ...] = ("S", "T")
    row: tuple[Instruction, ...] = (*(Run(Pass(kind, 0)) for kind in kinds), done)
    sizes = Sizes(gradient=[10, 30])
    rows = ((*row, Run(Pass("B", 0))), (*row, Run(Pass("B", 0))))
    program = Program(plan, rows)
    held = [[after for _, after in held_bytes(program, sizes, rank)] for rank in range(2)]
    assert held == [[0, 10, 0], [0, 30, 0]]


def test_room_for_exponentials_is_never_given_back() -> None:
    """Between S and T are two microbatches at a time; on a last stage one with B, two with W."""
    plan = Plan.from_text(ONE_RANK)
    assert peak_bytes(plan, Sizes(static=1000, room=10)) == [1020]
    whole = "microbatches 2\nstages 0.0 1.0\nvocabulary none\n0: F0 F1 {0}\n1: F0 {0} F1 {1}\n"
    fused = Plan.from_text(whole.replace("{0} F1 {1}", "B0 F1 B1").format("B0 B1"))
    assert peak_bytes(fused, Sizes(room=10)) == [0, 10]
    split = Plan.from_text(whole.replace("{0} F1 {1}", "B0 F1 B1 W0 W1").format("B0 B1 W0 W1"))
    assert peak_bytes(split, Sizes(room=10)) == [0, 20]
