import pytest

from megatron.training.words import ranks_in_words, samples_in_words


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([3], "rank 3"),
        ([0, 1], "ranks 0-1"),
        ([5, 0, 2, 1], "ranks 0-2, 5"),
        ([7, 9], "ranks 7, 9"),
        (range(1000), "ranks 0-999"),
    ],
)
def test_ranks_in_a_row_are_told_as_spans(ranks: list[int], words: str) -> None:
    assert ranks_in_words(ranks) == words


def test_samples_are_told_by_the_first_and_the_last() -> None:
    assert samples_in_words(range(8, 16)) == "samples 8-15"
    assert samples_in_words(range(8, 9)) == "sample 8"
