"""Sizes of the work on a GPU; counts of memory read them too, so they need no Triton and no GPU.

Shapes: n tokens, v rows of a shard.
"""

from typing import Final

SPAN: Final = 512
"""Rows of the logits that one program goes through. With 32,000 rows and 4,096 tokens, 2,016
programs share the work: some waves on any GPU."""

LEAST_SLICES: Final = 4
"""The least number of slices into which the tokens are cut where T forms the logits again."""

SLICE_ROWS: Final = 16384
"""The limit of a slice: it has at most as many logits as this number of rows has for all tokens.
With 8,192 tokens that is a quarter of a GiB, and work enough for a GPU."""


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
        again: T forms the logits again; no pass should then have all logits of a shard in memory.
    """
    slices = max(LEAST_SLICES if again else 1, quotient(rows, SLICE_ROWS))
    return max(1, quotient(tokens, slices))
