"""Growing batches against Megatron-Core's own calculator of microbatches."""

import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.batch_sizes import BatchSizes, Growth, Rampup, SizeSteps

MEGATRON: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "megatron_batch_sizes.json").read_text("utf-8")
)["runs"]
"""Random settings with the size of every batch, as the ``num_microbatches_calculator`` of the
release named in the file gives them, and the iterations that its training loop counts."""


def sizes_of(run: dict[str, Any]) -> BatchSizes:
    return BatchSizes(run["final"], Rampup(run["start"], run["increment"], run["samples"]))


@pytest.mark.parametrize("run", MEGATRON, ids=range(len(MEGATRON)))
def test_every_batch_has_megatrons_size(run: dict[str, Any]) -> None:
    sizes, consumed = sizes_of(run), 0
    for size in run["sizes"]:
        assert sizes.at(consumed) == size
        consumed += size
    assert sizes.iterations(run["length"]) == len(run["sizes"])
    assert sizes.samples_of(len(run["sizes"])) == consumed
    if run["train_iters"] is not None:  # Megatron counts too many if the run ends while they grow
        assert sizes.iterations(run["length"]) == run["train_iters"]


def test_some_runs_end_while_batches_grow_and_some_do_not() -> None:
    assert {run["train_iters"] is None for run in MEGATRON} == {True, False}
    assert any(run["sizes"][-1] == run["final"] for run in MEGATRON)


RAMPUPS = st.builds(
    lambda start, increment, increments, samples: BatchSizes(
        start + increment * increments, Rampup(start, increment, samples)
    ),
    st.integers(1, 9),
    st.integers(1, 5),
    st.integers(1, 9),
    st.integers(1, 400),
)


@st.composite
def listed(draw: st.DrawFn) -> BatchSizes:
    """Sizes that are listed, with the samples at which they begin."""
    numbers = st.lists(st.integers(1, 200), unique=True, max_size=5).map(sorted)
    begins = draw(numbers)
    more = draw(st.lists(st.integers(1, 9), min_size=len(begins), max_size=len(begins)))
    sizes = [*accumulate([draw(st.integers(1, 9)), *more])]
    return BatchSizes(sizes[-1], SizeSteps((0, *begins), tuple(sizes)))


@given(
    sizes=st.one_of(RAMPUPS, listed()),
    length=st.integers(0, 900),
    done=st.integers(0, 60),
)
def test_counting_in_one_go_is_counting_one_by_one(
    sizes: BatchSizes, length: int, done: int
) -> None:
    consumed = sum_of_first = sizes.samples_of(done)
    count = 0
    while consumed + sizes.at(consumed) <= length:
        consumed += sizes.at(consumed)
        count += 1
    assert sizes.iterations(length, sum_of_first) == count
    one_by_one = 0
    for _ in range(done):
        one_by_one += sizes.at(one_by_one)
    assert one_by_one == sum_of_first


def test_batches_without_a_rampup_are_all_alike() -> None:
    sizes = BatchSizes(6)
    assert [sizes.at(consumed) for consumed in (0, 7, 10**9)] == [6, 6, 6]
    assert (sizes.iterations(20), sizes.iterations(20, 18), sizes.samples_of(3)) == (3, 0, 18)


@pytest.mark.parametrize("growth", [Rampup(1, 1, 10**12), SizeSteps((0, 10**12), (1, 2))])
def test_long_growth_is_counted_at_once(growth: Growth) -> None:
    """Batches of one sample for 10^12 samples: nobody counts those one by one."""
    sizes = BatchSizes(2, growth)
    assert sizes.iterations(3 * 10**12) == 10**12 + (2 * 10**12) // 2


def test_a_listed_size_begins_with_its_sample() -> None:
    """As Megatron's calculator has it: the first batch that begins there or later."""
    steps = BatchSizes(8, SizeSteps((0, 5, 12), (2, 4, 8)))
    sizes, consumed = [], 0
    for _ in range(7):
        sizes.append(steps.at(consumed))
        consumed += sizes[-1]
    assert sizes == [2, 2, 2, 4, 4, 8, 8]
    assert steps.at(4) == 2
    assert steps.at(5) == 4
