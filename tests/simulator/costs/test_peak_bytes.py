"""Peaks in bytes: against a walk over the row by hand, and against counts of what is held."""

import re
from dataclasses import replace

import pytest
from harness.properties import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.schedules.costs import UNIT_COSTS
from megatron.schedules.held import in_flight
from megatron.schedules.lower import Program, Run, Start, lower
from megatron.schedules.make_plan import make_plan, plan_for
from megatron.schedules.plan import Plan
from megatron.schedules.request import Request
from megatron.simulator.costs.peak_bytes import Sizes, peak_bytes

ONE_RANK = """microbatches 2
stages 0.0
vocabulary vocab-2
0: IF0 IF1 F0 S0 F1 S1 T0 B0 T1 B1 IB0 IB1
"""


def test_a_running_peak_by_hand() -> None:
    """At S1: both activations, both exponentials and no embedding; at F0: two of the latter."""
    plan = Plan.from_text(ONE_RANK)
    assert peak_bytes(lower(plan), Sizes(static=1000, activation=100, exponentials=10)) == [1220]
    assert peak_bytes(lower(plan), Sizes(1000, 100, 10, embedding=1)) == [1220]
    assert peak_bytes(lower(plan), Sizes(1000, 100, 10, embedding=300)) == [1700]


def test_weight_gradients_hold_what_they_need() -> None:
    text = "microbatches 2\nstages 0.0\nvocabulary none\n0: F0 B0 F1 B1 {}\n"
    assert peak_bytes(lower(Plan.from_text(text.format(""))), Sizes(activation=5)) == [5]
    assert peak_bytes(lower(Plan.from_text(text.format("W0 W1"))), Sizes(activation=5)) == [10]


def test_what_b_computes_again_lives_until_w() -> None:
    """At B1: the factors of both; at F1: the factors of the first, and what F1 keeps."""
    text = "microbatches 2\nstages 0.0\nvocabulary none\n0: F0 B0 F1 {} W1\n"
    sizes = Sizes(activation=5, factors=30)
    assert peak_bytes(lower(Plan.from_text(text.format("B1 W0"))), sizes) == [60]
    assert peak_bytes(lower(Plan.from_text(text.format("W0 B1"))), sizes) == [35]
    joined = Plan.from_text("microbatches 2\nstages 0.0\nvocabulary none\n0: F0 F1 B0 B1\n")
    assert peak_bytes(lower(joined), sizes) == [10]


def test_what_r_computes_again_lives_until_b() -> None:
    """At R1: what both F keep, and two chunks computed again, or one if R0 was used by then."""
    text = "microbatches 2\nstages 0.0\nvocabulary none\n0: F0 F1 {}\n"
    sizes = Sizes(activation=5, repeated=30, factors=20)
    assert peak_bytes(lower(Plan.from_text(text.format("R0 R1 B0 B1"))), sizes) == [70]
    assert peak_bytes(lower(Plan.from_text(text.format("R0 B0 R1 B1"))), sizes) == [40]
    assert peak_bytes(lower(Plan.from_text(text.format("R0 B0 R1 B1 W0 W1"))), sizes) == [55]
    assert peak_bytes(lower(Plan.from_text(text.format("R0 B0 W0 R1 B1 W1"))), sizes) == [40]


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
    found = peak_bytes(lower(plan), Sizes(static=0.5, activation=per_rank))
    held = in_flight(plan)
    assert found == [0.5 + held[r] * plan.chunks * per_rank[r] for r in range(p)]


def test_sizes_by_chunk() -> None:
    """Rank 0 of a V of two ranks runs the first and the last stage."""
    plan = make_plan("zb-v", "none", 2, 1)
    assert peak_bytes(lower(plan), Sizes(activation=[[1, 20], [300, 4000]])) == [21, 4300]


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
        peak_bytes(lower(make_plan("zb-v", "none", 2, 1)), Sizes(**sizes))  # type: ignore[arg-type]


def test_a_pass_works_with_more_than_it_leaves() -> None:
    """Only while it runs: S1 comes when most is held, T0 when less is."""
    plan = Plan.from_text(ONE_RANK)
    sizes = Sizes(static=1000, activation=100, exponentials=10)
    assert peak_bytes(lower(plan), replace(sizes, working={"S": 7, "T": 5})) == [1227]
    assert peak_bytes(lower(plan), replace(sizes, working={"IB": 30})) == [1220]
    by_chunk = Sizes(activation=[[1, 20], [300, 4000]], working={"B": [[0, 5], [0, 0]]})
    assert peak_bytes(lower(make_plan("zb-v", "none", 2, 1)), by_chunk) == [26, 4300]


def test_slices_hold_parts_and_the_keys_of_the_whole_microbatch() -> None:
    """By hand, on one rank: F0 F0/1 B0/1 F1 B0 F1/1 B1/1 B1."""
    plan = make_plan("1f1b", "none", 1, 2, slices=2)
    assert peak_bytes(lower(plan), Sizes(static=100.0, activation=8.0)) == [108.0]
    # After F1: halves of two microbatches, the keys of both, the gradients of the first one's.
    assert peak_bytes(lower(plan), Sizes(activation=8.0, keys=3.0)) == [17.0]
    # A pass works on a slice.
    assert peak_bytes(lower(plan), Sizes(activation=8.0, working={"F": 2.0})) == [9.0]
    whole = make_plan("1f1b", "none", 1, 2)
    assert peak_bytes(lower(whole), Sizes(activation=8.0, keys=3.0)) == [8.0]


def test_gradients_of_embeddings_wait_for_ib() -> None:
    """Both of them after B1, when the activations are gone; B1 has formed its own at its end."""
    plan = Plan.from_text(ONE_RANK)
    sizes = Sizes(static=1000, activation=100, exponentials=10, embedding_gradient=500)
    assert peak_bytes(lower(plan), sizes) == [2000]
    at_once = Plan.from_text(ONE_RANK.replace("B0 T1 B1 IB0 IB1", "B0 IB0 T1 B1 IB1"))
    assert peak_bytes(lower(at_once), sizes) == [1610]  # when B0 ends
    assert peak_bytes(lower(plan), replace(sizes, working={"IB": 70})) == [2070]


def most_gradients(program: Program, rank: int) -> int:
    """Return the most units whose gradient of embeddings the rank has, and still needs."""
    source = program.plan.stages[0]
    there, read, waited, most = set[object](), set[object](), set[object](), 0
    for step in program.rows[rank]:
        item = step.item if isinstance(step, Run) else step.comm
        unit = item.microbatch, item.slice
        if isinstance(step, Run):
            if step.item.kind == "IB":
                read.add(unit)
            elif step.item.kind == "B" and (rank, step.item.chunk) == source:
                there.add(unit)
        elif step.comm.kind == "CIB":
            (there if isinstance(step, Start) else waited).add(unit)
        most = max(most, len(there - (read & waited)))
    return most


@pytest.mark.parametrize("cib", [0.0, 3.0])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "interleaved"])
@pytest.mark.parametrize("slices", [1, 2])
def test_a_rank_holds_gradients_of_embeddings_from_b_or_the_broadcast_to_ib(
    schedule: str, cib: float, slices: int
) -> None:
    """The rank that broadcasts may wait for the broadcast after IB, and frees the gradient then."""
    costs = replace(UNIT_COSTS, comms={"CIB": cib})
    program = lower(plan_for(Request(schedule, "vocab-2", 2, 8, costs, slices=slices)), costs)
    found = peak_bytes(program, Sizes(embedding_gradient=[6.0, 60.0]))
    expected = [most_gradients(program, rank) for rank in range(2)]
    assert found == [6.0 * expected[0] / slices, 60.0 * expected[1] / slices]
    assert max(expected) > 1
