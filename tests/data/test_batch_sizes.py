"""Growing batches against Megatron-Core's own calculator of microbatches."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.batch_sizes import BatchSizes, Rampup

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


@given(
    start=st.integers(1, 9),
    increment=st.integers(1, 5),
    increments=st.integers(1, 9),
    samples=st.integers(1, 400),
    length=st.integers(0, 900),
    done=st.integers(0, 60),
)
def test_counting_in_one_go_is_counting_one_by_one(
    start: int, increment: int, increments: int, samples: int, length: int, done: int
) -> None:
    sizes = BatchSizes(start + increment * increments, Rampup(start, increment, samples))
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


def test_a_long_rampup_is_counted_at_once() -> None:
    """Batches of one sample for 10^12 samples: nobody counts those one by one."""
    sizes = BatchSizes(2, Rampup(1, 1, 10**12))
    assert sizes.iterations(3 * 10**12) == 10**12 + (2 * 10**12) // 2
