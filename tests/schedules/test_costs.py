"""Costs by rank and chunk, whole backwards, and what is refused."""

from math import inf, nan

import pytest

from megatron.schedules.costs import Costs, Time
from megatron.schedules.make_plan import make_plan
from megatron.schedules.needs import Comm
from megatron.schedules.passes import Pass, PassKind

WHOLE = make_plan("interleaved", "none", 2, 2, chunks=2)
SPLIT = make_plan("zb-v", "none", 2, 2)


@pytest.mark.parametrize(
    ("time", "expected"),
    [
        (3.0, [3, 3, 3, 3]),
        ([1.0, 2.0], [1, 1, 2, 2]),
        ([[1.0, 2.0], [3.0, 4.0]], [1, 2, 3, 4]),
        ([5.0, [3.0, 4.0]], [5, 5, 3, 4]),
    ],
)
def test_one_time_or_one_for_each_rank_or_chunk(time: Time, expected: list[float]) -> None:
    costs = Costs({"F": time})
    places = [(rank, Pass("F", 1, chunk)) for rank in (0, 1) for chunk in (0, 1)]
    assert [costs.of_pass(WHOLE, rank, item) for rank, item in places] == expected


def test_a_backward_that_is_not_split_runs_the_weight_gradient_too() -> None:
    costs = Costs({"B": [2, 3], "W": [[10, 20], [30, 40]]})
    assert costs.of_pass(WHOLE, 1, Pass("B", 0, 1)) == 43
    assert costs.of_pass(SPLIT, 1, Pass("B", 0, 1)) == 3
    assert costs.of_pass(SPLIT, 1, Pass("W", 0, 1)) == 40
    assert Costs({"B": 2}).of_pass(WHOLE, 0, Pass("B", 0)) == 2  # the whole backward already


def test_communication_is_free_unless_it_has_a_cost() -> None:
    costs = Costs({}, {"X": 0.5})
    assert costs.of_comm(Comm("X", 3, 1)) == 0.5
    assert costs.of_comm(Comm("C1", 3)) == 0


def test_costs_of_a_rank_are_shared_out_among_its_chunks() -> None:
    costs = Costs({"F": 4, "B": [2, 6], "W": [[1], [1]], "S": 8}, {"X": 1}).passes
    with pytest.raises(ValueError, match="costs by chunk cannot be divided"):
        Costs(costs).per_chunk(2)
    shared = Costs({"F": 4, "B": [2, 6], "S": 8}, {"X": 1}).per_chunk(2)
    assert shared == Costs({"F": 2, "B": [1, 3], "S": 8}, {"X": 1})


@pytest.mark.parametrize("wrong", [-1.0, nan, inf, -inf])
def test_what_is_no_time_is_refused(wrong: float) -> None:
    for time in (wrong, [1.0, wrong], [[1.0, 2.0], [3.0, wrong]]):
        with pytest.raises(ValueError, match=f"B={wrong:g} is no cost: a time is a finite number"):
            Costs({"F": 1, "B": time})
    with pytest.raises(ValueError, match=f"C1={wrong:g} is no cost"):
        Costs({"F": 1}, {"C1": wrong})


@pytest.mark.parametrize(
    ("time", "message"),
    [
        ([1.0], "F has 1 times and none for rank 1: give one time, or one for each rank"),
        ([1.0, [2.0]], "F has 1 times and none for chunk 1: give one time, or one for each chunk"),
    ],
)
def test_a_rank_or_chunk_without_a_time_is_named(time: Time, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Costs({"F": time}).of_pass(WHOLE, 1, Pass("F", 0, 1))


def test_a_kind_without_a_time_is_named() -> None:
    with pytest.raises(ValueError, match="no cost is given for S passes: give S=TIME"):
        Costs({"F": 1}).of_pass(WHOLE, 0, Pass("S", 0))


@pytest.mark.parametrize("kind", ["F", "B", "S"])
def test_a_slice_takes_its_part_of_a_microbatch(kind: PassKind) -> None:
    """Later slices are dearer where attention takes a part of the time; together they take all."""
    plan = make_plan("1f1b", "vocab-2", 2, 2, slices=4)
    whole = Costs({"F": [3, 5], "B": 8, "S": 2, "T": 1, "IF": 1, "IB": 1}, {"X": 4.0, "C1": 2.0})
    equal = whole.of_pass(plan, 1, Pass(kind, 1, 0, 2))
    assert equal == whole.time(kind, 1) / 4
    cut = whole.in_slices((256, 128, 128, 128), {"F": 0.5, "B": 0.5})
    times = [cut.of_pass(plan, 1, Pass(kind, 1, 0, s)) for s in range(4)]
    assert sum(times) == pytest.approx(whole.time(kind, 1))
    if kind == "S":
        assert times == pytest.approx([0.8, 0.4, 0.4, 0.4])
    else:
        assert times[1] < times[2] < times[3]
    assert cut.of_comm(Comm("X", 0, 0, 0), slices=4) == pytest.approx(1.6)
    assert cut.of_comm(Comm("C1", 0, 0, 3), slices=4) == pytest.approx(0.4)
    with pytest.raises(ValueError, match="costs of 4 slices of a microbatch, and the plan has 2"):
        cut.of_pass(make_plan("1f1b", "none", 2, 2, slices=2), 0, Pass("F", 0))


def test_equal_costs_have_equal_hashes_whatever_the_order_of_their_kinds() -> None:
    one = Costs({"F": [1.0, 2.0], "B": 3.0}, {"X": [0.5]}, slices=(Costs({"F": 1.0}),))
    same = Costs({"B": 3.0, "F": [1.0, 2.0]}, {"X": [0.5]}, slices=(Costs({"F": 1.0}),))
    other = Costs({"F": [1.0, 2.5], "B": 3.0}, {"X": [0.5]}, slices=(Costs({"F": 1.0}),))
    assert one == same
    assert hash(one) == hash(same)
    assert len({one, same, other}) == 2
