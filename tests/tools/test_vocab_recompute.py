"""The measurement of S and T: memory is what a process has, times have the ratio that is told."""

import pytest

from tools.vocab_recompute import WAYS, ShardFlags, measure_times, memory_of

SIZES = ShardFlags(vocab_size=16_000, shards=1, hidden_size=16, seq_length=1024, rounds=2)
EXPONENTIALS = 2 * 16_000 * 1024
ARGV = ["--vocab-size", "16000", "--shards", "1", "--hidden-size", "16", "--seq-length", "1024"]


@pytest.mark.full
@pytest.mark.parametrize("treatment", ["vocab-2", "vocab-1"])
def test_exponentials_are_in_memory_only_where_they_are_kept(treatment: str) -> None:
    kept, again = (memory_of(ARGV, treatment, recompute) for recompute in (False, True))
    assert kept["between"] == pytest.approx(EXPONENTIALS, rel=0.15)
    assert again["between"] < 0.15 * EXPONENTIALS
    assert again["peak"] < 0.5 * EXPONENTIALS < kept["peak"]


def test_every_way_is_timed_in_every_round() -> None:
    times = measure_times(SIZES)
    assert set(times) == set(WAYS)
    for taken in times.values():
        assert len(taken) == SIZES.rounds
        assert all(each.both == each.s + each.t > 0 for each in taken)
