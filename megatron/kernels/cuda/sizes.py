"""Sizes of the work on a GPU; counts of memory read them too, so they need no Triton and no GPU.

Shapes: n tokens, v rows of a shard.
"""

from typing import Final

SPAN: Final = 512
"""Rows of the logits that one program goes through. With 32,000 rows and 4,096 tokens, 2,016
programs share the work: some waves on any GPU."""

LEAST_TILES: Final = 4
"""The least number of tiles into which the rows are cut where T forms the logits again."""

TILE_ROWS: Final = 16384
"""The most rows of a tile where logits are not kept. With 8,192 tokens a tile of logits in 16 bits
is a quarter of a GiB, and work enough for a GPU."""

LEAST_TOKENS: Final = 1024
"""The least number of tokens for which S, where it forms A and keeps no logits, takes all rows at a
time. M is read for every slice of the tokens: for 128 tokens, products wait for it. And 512 tokens
are too small a piece of A to occupy a GPU."""

EVEN_TOKENS: Final = 8
"""Tokens of a slice are a multiple of it: cuBLAS reads 16 bytes of a row at a time only if each row
begins at a multiple of them."""


def quotient(amount: int, share: int) -> int:
    """Return how many shares an amount takes: the quotient, rounded up."""
    return -(-amount // share)


def next_power_of_2(number: int) -> int:
    """Return the least power of 2 that is not smaller than a positive number."""
    assert number > 0, number
    return 1 << (number - 1).bit_length()


def tile_rows(rows: int, *, again: bool) -> int:
    """Return how many rows have logits at a time where logits are not kept.

    Args:
        rows: v.
        again: T forms the logits again; no pass should then have all logits of a shard in memory.
    """
    tiles = max(LEAST_TILES if again else 1, quotient(rows, TILE_ROWS))
    return quotient(rows, tiles)


def slice_tokens(rows: int, tokens: int, logits: int) -> int:
    """Return how many tokens S takes at a time to form A; 0: it takes tiles of rows instead.

    Slices are about equal, and none is a small rest, for which all of M would be read again.

    Args:
        rows: v, at least 1.
        tokens: n.
        logits: numbers for which there is memory.
    """
    most, share = logits // rows, min(EVEN_TOKENS, LEAST_TOKENS)
    if most >= tokens:
        return tokens
    most -= most % share
    if most < LEAST_TOKENS:
        return 0
    return quotient(quotient(tokens, quotient(tokens, most)), share) * share
