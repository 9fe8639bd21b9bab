"""Limits of microbatches in flight that differ from rank to rank."""

from dataclasses import replace

import pytest

from megatron.schedules.check import check
from megatron.schedules.costs import Costs
from megatron.schedules.forwards_first import forwards_first
from megatron.schedules.held import fits, in_flight
from megatron.schedules.make_plan import one_microbatch_of, plan_for
from megatron.schedules.request import Request
from megatron.schedules.timing import earliest_end
from megatron.schedules.treatments import TREATMENTS

LIMITS = ((1.0, 4.0, 4.0, 1.0), (6.0, 2.0, 3.0, 1.0), (4.0, 3.0, 2.0, 1.0), (1.0, 2.0, 3.0, 4.0))


def request(
    limits: tuple[float, ...], treatment: str = "none", schedule: str = "zb-auto"
) -> Request:
    return Request(schedule, treatment, 4, 10, memory_limit=max(limits)).within(limits)


@pytest.mark.parametrize(
    ("limits", "treatment"),
    [*zip(LIMITS, ("none", "vocab-1", "vocab-2", "interlaced"), strict=True)],
)
def test_no_rank_exceeds_its_own_limit(limits: tuple[float, ...], treatment: str) -> None:
    plan = plan_for(request(limits, treatment))
    check(plan)
    held = in_flight(plan)
    assert all(own <= most for own, most in zip(held, limits, strict=True))


@pytest.mark.parametrize("schedule", ["auto", "optimal"])
def test_schedules_that_search_keep_to_the_limits(schedule: str) -> None:
    if schedule == "optimal":
        pytest.importorskip("ortools")
    limits = (3.0, 3.0, 2.0, 2.0)
    few = replace(request(limits, schedule=schedule), microbatches=4)
    assert fits(plan_for(few), limits)


def test_room_on_the_first_ranks_alone_shortens_the_plan() -> None:
    """In 1F1B rank r of p holds p - r microbatches, so the last ranks need no room."""
    costs = Costs({"F": 1.0, "B": 1.0, "W": 1.0})
    narrow, sloped = (
        earliest_end(plan_for(replace(request(limits), costs=costs)), costs)
        for limits in ((1.0,) * 4, (4.0, 3.0, 2.0, 1.0))
    )
    assert sloped < narrow / 2


def test_equal_limits_are_the_limit_of_all() -> None:
    equal = request((3.0,) * 4)
    assert equal == Request("zb-auto", "none", 4, 10, memory_limit=3.0)
    assert equal.limits == (3.0,) * 4
    without = replace(equal, schedule="zb-v").within(())
    assert (without.memory_limit, without.limits) == (None, ())


@pytest.mark.parametrize("limits", [(2.0, 3.0), (0.5, 3.0, 3.0, 3.0), (1.0, 2.0, 2.0, 2.0)])
def test_limits_of_other_ranks_are_refused(limits: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=r"not those of 4 ranks: give a number of at least 1"):
        Request("zb-auto", "none", 4, 10, memory_limit=3.0, rank_limits=limits)


@pytest.mark.parametrize("treatment", TREATMENTS)
@pytest.mark.parametrize(
    ("schedule", "chunks", "slices"),
    [("zb-h1", 1, 1), ("zb-v", 2, 1), ("1f1b", 1, 1), ("interleaved", 3, 1), ("zb-h1", 1, 2)],
)
def test_forwards_first_holds_every_microbatch(
    treatment: str, schedule: str, chunks: int, slices: int
) -> None:
    asked = Request(
        schedule,
        treatment,
        4,
        1,
        slices=slices,
        chunks=chunks if schedule == "interleaved" else None,
    )
    plan = forwards_first(one_microbatch_of(asked), 5)
    check(plan)
    assert in_flight(plan) == [5.0] * 4
    for row in plan.rows:
        kinds = [item.kind for item in row]
        assert kinds.index("B") > max(i for i, kind in enumerate(kinds) if kind == "F")
