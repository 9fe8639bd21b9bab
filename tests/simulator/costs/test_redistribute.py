"""Layers spread over stages: no other distribution has a faster slowest stage."""

from itertools import product
from math import nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.simulator.costs.redistribute import redistribute, redistribute_stages

times = st.floats(0, 10)


def slowest(counts: list[int], layer_time: float, extra: list[float]) -> float:
    return max(e + count * layer_time for e, count in zip(extra, counts, strict=True))


@given(st.integers(0, 7), st.lists(times, min_size=1, max_size=4), times)
def test_no_distribution_is_better(layers: int, extra: list[float], layer_time: float) -> None:
    counts = redistribute(layers, len(extra), layer_time, extra)
    others = (c for c in product(range(layers + 1), repeat=len(extra)) if sum(c) == layers)
    least = min(slowest(list(other), layer_time, extra) for other in others)
    assert sum(counts) == layers
    assert slowest(counts, layer_time, extra) == pytest.approx(least)


def test_without_other_work_the_rest_goes_to_the_last_stages() -> None:
    assert redistribute(10, 4, 1.0, [0.0] * 4) == [2, 2, 3, 3]


def test_an_output_layer_of_six_layers_leaves_the_last_stage_without() -> None:
    assert redistribute(32, 8, 1.0, [0.0] * 7 + [6.25]) == [4, 4, 4, 5, 5, 5, 5, 0]


@given(st.integers(0, 6), st.integers(2, 4), st.data())
def test_the_last_count_may_be_given(layers: int, stages: int, data: st.DataObject) -> None:
    last = data.draw(st.integers(0, layers))
    counts = redistribute(layers, stages, 1.0, [0.0] * stages, last)
    assert counts[-1] == last
    assert sum(counts) == layers
    assert max(counts[:-1]) - min(counts[:-1]) <= 1


@given(st.integers(0, 6), st.lists(times, min_size=4, max_size=4), st.none() | st.integers(0, 2))
def test_of_stages_that_share_ranks_the_slowest_rank_counts(
    layers: int, extra: list[float], last: int | None
) -> None:
    """In a V the first and the last stage are on rank 0."""
    stages = ((0, 0), (1, 0), (1, 1), (0, 1))
    last = last if last is None or last <= layers else None

    def slowest_rank(counts: tuple[int, ...] | list[int]) -> float:
        time = [count + other for count, other in zip(counts, extra, strict=True)]
        return max(time[0] + time[3], time[1] + time[2])

    counts = redistribute_stages(layers, stages, 1.0, extra, last)
    others = (
        other
        for other in product(range(layers + 1), repeat=4)
        if sum(other) == layers and last in (None, other[-1])
    )
    assert sum(counts) == layers
    assert last in (None, counts[-1])
    assert slowest_rank(counts) == pytest.approx(min(map(slowest_rank, others)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 2, 1.0, [0.0, 0.0]), "-1 layers cannot be spread over 2 stages"),
        ((4, 0, 1.0, []), "over 0 stages"),
        ((4, 2, 1.0, [0.0]), "1 extra times for 2 stages"),
        ((4, 2, nan, [0.0, 0.0]), "nan is no time"),
        ((4, 2, 1.0, [0.0, -3.0]), "-3 is no time"),
        ((4, 2, 1.0, [0.0, 0.0], 5), "cannot have 5 of 4 layers: give it 0 to 4"),
        ((4, 1, 1.0, [0.0], 3), "cannot have 3 of 4 layers: give it all 4"),
    ],
)
def test_what_makes_no_distribution_is_refused(arguments: tuple, message: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ValueError, match=message):
        redistribute(*arguments)


@given(st.integers(0, 40), st.lists(times, min_size=1, max_size=6), times)
def test_every_layer_goes_to_the_last_of_the_fastest_stages(
    layers: int, extra: list[float], layer_time: float
) -> None:
    """The rule as it is stated, one layer after the other."""
    counts = [0] * len(extra)
    for _ in range(layers):
        work = [own + count * layer_time for own, count in zip(extra, counts, strict=True)]
        counts[max(stage for stage, time in enumerate(work) if time == min(work))] += 1
    assert redistribute(layers, len(extra), layer_time, extra) == counts


def test_endless_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="1000000000 layers cannot be spread over 2 stages"):
        redistribute(10**9, 2, 1.0, [0.0, 0.0])
