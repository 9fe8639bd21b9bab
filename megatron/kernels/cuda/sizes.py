"""Sizes of the work on a GPU, for those who count memory too: here is neither Triton nor a GPU.

Shapes: n tokens, v rows of a shard.
"""

from typing import Final

SPAN: Final = 512
"""Rows of the logits that one program goes through. At 32,000 rows and 4,096 tokens 2,016 programs
share the work, some waves on any GPU."""

LEAST_SLICES: Final = 4
"""Slices of the tokens whose logits T forms again, at least."""

SLICE_ROWS: Final = 16384
"""A slice has as many logits as so many rows of a shard have for all tokens, at most: a quarter of
a GiB with 8,192 tokens, and work enough for a GPU."""


def quotient(amount: int, share: int) -> int:
    """Return how many shares an amount takes: the quotient, rounded up."""
    return -(-amount // share)


def next_power_of_2(number: int) -> int:
    """Return the least power of 2 that is not smaller than a positive number."""
    assert number > 0, number
    return 1 << (number - 1).bit_length()


def slice_tokens(rows: int, tokens: int, *, again: bool) -> int:
    """Return how many tokens have logits at a time where logits are not kept.

    Args:
        rows: v.
        tokens: n.
        again: T forms the logits again, so that a shard shall not have all of them at a time.
    """
    slices = max(LEAST_SLICES if again else 1, quotient(rows, SLICE_ROWS))
    return max(1, quotient(tokens, slices))
