"""Layers of unequal times over stages: no better distribution exists, and equal ones stay equal."""

from collections.abc import Sequence
from itertools import accumulate, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.simulator.costs.unequal_layers import spread_unequal

Stages = list[tuple[int, int]]
KINDS = st.lists(st.sampled_from([0.6, 1.0, 1.7]), min_size=1, max_size=7)
IN_A_ROW: Stages = [(0, 0), (1, 0), (2, 0)]
INTERLEAVED: Stages = [(0, 0), (1, 0), (0, 1), (1, 1)]
IN_A_V: Stages = [(0, 0), (1, 0), (1, 1), (0, 1)]


def slowest(
    counts: Sequence[int], times: Sequence[float], stages: Stages, extra: Sequence[float]
) -> tuple[float, float]:
    """Return the times of the slowest rank and of the slowest stage."""
    ends = list(accumulate(counts))
    each = [
        own + sum(times[end - count : end])
        for own, count, end in zip(extra, counts, ends, strict=True)
    ]
    ranks = {rank for rank, _ in stages}
    of_ranks = [
        sum(own for own, (at, _) in zip(each, stages, strict=True) if at == rank) for rank in ranks
    ]
    return max(of_ranks), max(each)


def every(layers: int, stages: int) -> list[tuple[int, ...]]:
    return [c for c in product(range(layers + 1), repeat=stages) if sum(c) == layers]


@given(KINDS, st.lists(st.sampled_from([0.0, 0.5, 2.5]), min_size=3, max_size=3))
def test_with_one_stage_a_rank_no_distribution_is_better(
    times: list[float], extra: list[float]
) -> None:
    counts = spread_unequal(times, IN_A_ROW, extra)
    assert sum(counts) == len(times)
    least = min(slowest(other, times, IN_A_ROW, extra)[1] for other in every(len(times), 3))
    assert slowest(counts, times, IN_A_ROW, extra)[1] == pytest.approx(least)


@pytest.mark.parametrize("stages", [INTERLEAVED, IN_A_V], ids=["interleaved", "in a V"])
@given(times=KINDS)
def test_with_two_stages_a_rank_the_slowest_rank_is_no_slower_than_with_equal_numbers(
    stages: Stages, times: list[float]
) -> None:
    extra = [0.0] * 4
    counts = spread_unequal(times, stages, extra)
    assert sum(counts) == len(times)
    each, more = divmod(len(times), 4)
    even = [each + (stage < more) for stage in range(4)]
    found, equal = (slowest(own, times, stages, extra) for own in (counts, even))
    assert found[0] <= equal[0] + max(times) * (1 - 1e-9)
    if not more:
        assert found[0] <= equal[0] * (1 + 1e-9)


@given(st.integers(1, 4), st.integers(1, 6), st.sampled_from([0.3, 1.0]))
def test_layers_that_divide_and_take_equal_times_are_spread_evenly(
    ranks: int, each: int, time: float
) -> None:
    stages = [(rank, 0) for rank in range(ranks)]
    assert spread_unequal([time] * ranks * each, stages, [0.0] * ranks) == [each] * ranks


def test_cheap_layers_in_front_make_the_first_stages_longer() -> None:
    times = [0.5] * 4 + [1.0] * 10
    assert spread_unequal(times, IN_A_ROW, [0.0] * 3) == [6, 4, 4]
    assert spread_unequal(times, IN_A_ROW, [0.0, 0.0, 2.0]) == [6, 5, 3]


def test_equal_numbers_are_kept_if_no_other_distribution_is_faster() -> None:
    """Stages [0.5, 1], [1, 1], [1, 1] are as slow as any; so are 3, 2 and 1 layers."""
    assert spread_unequal([0.5, 1.0, 1.0, 1.0, 1.0, 1.0], IN_A_ROW, [0.0] * 3) == [2, 2, 2]


@given(KINDS, st.integers(0, 3))
def test_the_last_count_may_be_given(times: list[float], last: int) -> None:
    last = min(last, len(times))
    extra = [0.0] * 3
    counts = spread_unequal(times, IN_A_ROW, extra, last)
    assert counts[-1] == last
    others = [other for other in every(len(times), 3) if other[-1] == last]
    least = min(slowest(other, times, IN_A_ROW, extra)[1] for other in others)
    assert slowest(counts, times, IN_A_ROW, extra)[1] == pytest.approx(least)


@pytest.mark.parametrize(
    ("times", "extra", "last", "words"),
    [
        ([1.0, -1.0], [0.0] * 3, None, "-1 is no time"),
        ([1.0], [0.0], None, "1 extra times for 3 stages"),
        ([1.0], [0.0] * 3, 2, "cannot have 2 of 1 layers"),
    ],
)
def test_bad_numbers_are_refused(
    times: list[float], extra: list[float], last: int | None, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        spread_unequal(times, IN_A_ROW, extra, last)
