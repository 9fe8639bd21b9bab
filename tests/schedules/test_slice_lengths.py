"""Slices have equal lengths, or equal times in multiples of 128 tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.schedules.slice_lengths import TOKENS, causal_work, slice_lengths, slice_shares

shares = st.floats(0, 1)


@given(st.integers(1, 16), st.integers(1, 16))
def test_uniform_slices_are_equally_long(length: int, n: int) -> None:
    assert slice_lengths(length * n, n) == (length,) * n


@given(st.integers(1, 16), st.integers(0, 500), shares)
def test_balanced_slices_take_equal_times_up_to_a_multiple(
    n: int, more: int, attention: float
) -> None:
    blocks = n + more
    work = causal_work(TOKENS * blocks, attention)
    lengths = slice_lengths(TOKENS * blocks, n, "balanced", work)
    assert sum(lengths) == TOKENS * blocks
    assert all(length > 0 and length % TOKENS == 0 for length in lengths)
    if more > 16 * n:  # then no slice is as short as a multiple allows
        # An end moves by half a multiple at most, where a token takes 1 + attention at most.
        most = (1 + attention) / blocks
        assert all(abs(share - 1 / n) <= most for share in slice_shares(lengths, attention))


@given(st.integers(0, 12 * TOKENS - 1))
def test_every_slice_has_tokens_even_if_one_token_has_all_the_work(place: int) -> None:
    lengths = slice_lengths(12 * TOKENS, 4, "balanced", lambda tokens: float(tokens > place))
    assert min(lengths) >= TOKENS
    assert sum(lengths) == 12 * TOKENS


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), shares)
def test_shares_count_the_keys_that_queries_read(lengths: list[int], attention: float) -> None:
    """Summed token by token: a token's attention is over all tokens up to itself."""
    total, token, expected = sum(lengths), 0, []
    for length in lengths:
        keys = sum(token + i + 0.5 for i in range(length))
        expected.append((1 - attention) * length / total + attention * keys / (total**2 / 2))
        token += length
    assert slice_shares(lengths, attention) == pytest.approx(expected)
    assert sum(slice_shares(lengths, attention)) == pytest.approx(1)


@pytest.mark.parametrize(
    ("length", "n", "strategy", "message"),
    [
        (1000, 3, "uniform", "--num-seq-splits 3 does not divide --seq-length 1000: take a div"),
        (1000, 2, "balanced", "--seq-length 1000 has no 2 of them: take a sequence of at least"),
        (256, 3, "balanced", "--seq-length 256 has no 3 of them: take a sequence of at least 384"),
    ],
)
def test_what_cannot_be_cut_is_refused(length: int, n: int, strategy: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        slice_lengths(length, n, "uniform" if strategy == "uniform" else "balanced")
