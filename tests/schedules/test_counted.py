"""A number agrees with its noun."""

import pytest

from megatron.schedules.counted import counted, were


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


def test_the_verb_and_the_thousands_follow_the_number() -> None:
    assert [were(number) for number in (0, 1, 2)] == ["were", "was", "were"]
    assert counted(1, "document", grouped=True) == "1 document"
    assert counted(1234567, "document", grouped=True) == "1,234,567 documents"
    assert counted(1234567, "document") == "1234567 documents"
