"""The lengths of a microbatch's slices, in tokens.

Attention of a later slice reads more keys, so slices of equal length take more and more time.
Slices of equal time (Seq1F1B, arXiv 2406.03488) begin long and become shorter.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import sqrt
from typing import Final, Literal, get_args

SliceStrategy = Literal["uniform", "balanced"]
SLICE_STRATEGIES: Final[tuple[SliceStrategy, ...]] = get_args(SliceStrategy)

TOKENS: Final = 128
"""Lengths of balanced slices are multiples of this number, which suits the tiles of kernels."""


def slice_lengths(
    seq_length: int,
    slices: int,
    strategy: SliceStrategy = "uniform",
    attention: float = 0.0,
) -> tuple[int, ...]:
    """Return the lengths of the slices of a sequence, in order.

    Args:
        seq_length: tokens of the sequence, of all context-parallel ranks together.
        slices: number of slices n.
        strategy: slices of equal length (``uniform``) or of equal time (``balanced``).
        attention: share of the time of the whole sequence that attention takes; 0 to 1. The rest
            of the time is the same for every token.

    Raises:
        ValueError: if the sequence cannot be cut in this way.
    """
    assert 0 <= attention <= 1, f"{attention} is no share"
    if strategy == "uniform":
        if slices < 1 or seq_length % slices:
            raise ValueError(
                f"--num-seq-splits {slices} does not divide --seq-length {seq_length}: take a "
                "divisor, or --seq-split-strategy balanced"
            )
        return (seq_length // slices,) * slices
    blocks, rest = divmod(seq_length, TOKENS)
    if slices < 1 or rest or blocks < slices:
        raise ValueError(
            f"--seq-split-strategy balanced cuts into multiples of {TOKENS} tokens, and "
            f"--seq-length {seq_length} has no {slices} of them: take a sequence of at least "
            f"{max(slices, 1) * TOKENS} tokens, a multiple of {TOKENS}, or --seq-split-strategy "
            "uniform"
        )
    ends = [0]
    for k in range(1, slices + 1):
        nearest = round(blocks * _place_of(k / slices, attention))
        ends.append(min(max(nearest, ends[-1] + 1), blocks - (slices - k)))
    return tuple(TOKENS * (end - begin) for begin, end in pairwise(ends))


def slice_shares(lengths: Sequence[int], attention: float = 0.0) -> tuple[float, ...]:
    """Return the share of the time of the whole sequence that each slice takes.

    Args:
        lengths: the lengths of the slices.
        attention: as for ``slice_lengths``.
    """
    ends = [end / sum(lengths) for end in accumulate(lengths, initial=0)]
    return tuple(
        (1 - attention) * (end - begin) + attention * (end**2 - begin**2)
        for begin, end in pairwise(ends)
    )


def _place_of(share: float, attention: float) -> float:
    """Return the part x of the sequence that takes a share of its time.

    x solves (1 - attention) x + attention x^2 = share: a causal query reads all keys before it.
    """
    linear = 1 - attention
    return 2 * share / (linear + sqrt(linear**2 + 4 * attention * share))
