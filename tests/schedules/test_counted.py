"""A number agrees with its noun."""

import pytest

from megatron.schedules.counted import counted


@pytest.mark.parametrize(
    ("number", "noun", "written"),
    [
        (1, "microbatch", "1 microbatch"),
        (1.0, "microbatch", "1 microbatch"),
        (1.00001, "microbatch", "1 microbatch"),
        (2, "microbatch", "2 microbatches"),
        (0, "shard", "0 shards"),
        (4.5, "microbatch in flight", "4.5 microbatches in flight"),
        (1, "microbatch in flight", "1 microbatch in flight"),
        (146484375, "sample", "146484375 samples"),
        (2, "copy", "2 copies"),
    ],
)
def test_a_number_agrees_with_its_noun(number: float, noun: str, written: str) -> None:
    assert counted(number, noun) == written
