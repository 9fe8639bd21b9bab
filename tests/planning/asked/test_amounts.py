"""Amounts of tokens, and the samples that they are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.planning.asked.amounts import WITHIN, samples_of, tokens_of


@pytest.mark.parametrize(
    ("word", "tokens"),
    [
        ("4M", 4_000_000),
        ("4m", 4_000_000),
        ("4194304", 4_194_304),
        ("1.5T", 1_500_000_000_000),
        ("300B", 300_000_000_000),
        ("0.5k", 500),
    ],
)
def test_words_of_tokens(word: str, tokens: int) -> None:
    assert tokens_of(word) == tokens


@pytest.mark.parametrize(
    "word", ["", "M", "4MB", "-4M", "1.2345k", "4 M", "1e6", "nan", "0", "1" * 40]
)
def test_other_words_are_refused(word: str) -> None:
    with pytest.raises(ValueError, match=r"give a number of tokens|must be"):
        tokens_of(word)


def test_a_million_that_is_meant_as_a_power_of_two_becomes_one() -> None:
    assert samples_of(4_000_000, 8192) == 512
    assert samples_of(4_000_000, 4000) == 1000  # a whole number of samples is taken as it is
    with pytest.raises(
        ValueError, match=r"12,000 tokens are .* of 8,192: give 8192, or --global-b"
    ):
        samples_of(12_000, 8192)


@given(st.integers(1, 10**8), st.integers(1, 1 << 20))
def test_samples_are_near_and_as_even_as_any_that_are_near(fine: int, length: int) -> None:
    """Compared with all numbers that are near, one by one; the batch has up to 2,000 samples."""
    tokens = max(1, fine * length // 50_000)
    wanted = tokens / length
    near = [n for n in range(1, 2200) if abs(n - wanted) <= WITHIN * wanted]
    if tokens % length == 0:
        assert samples_of(tokens, length) == tokens // length
    elif not near:
        with pytest.raises(ValueError, match="no whole number of samples"):
            samples_of(tokens, length)
    else:
        evenness = max(n & -n for n in near)
        best = min((n for n in near if n & -n == evenness), key=lambda n: abs(n - wanted))
        assert samples_of(tokens, length) == best
