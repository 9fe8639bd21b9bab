"""The lengths of a microbatch's slices, in tokens.

Attention of a later slice reads more keys, so slices of equal length take more and more time.
Slices of equal time (Seq1F1B, arXiv 2406.03488) begin long and become shorter.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Final, Literal, TypeAlias, get_args

SliceStrategy: TypeAlias = Literal["uniform", "balanced"]
"""Slices of equally many tokens, or of equal work."""

SLICE_STRATEGIES: Final[tuple[SliceStrategy, ...]] = get_args(SliceStrategy)

TOKENS: Final = 128
"""Lengths of balanced slices are multiples of this number, which suits the tiles of kernels."""

Work: TypeAlias = Callable[[int], float]
"""Returns the work of so many first tokens of a sequence, in any unit."""


def slice_lengths(
    seq_length: int, slices: int, strategy: SliceStrategy = "uniform", work: Work = float
) -> tuple[int, ...]:
    """Return the lengths of the slices of a sequence, in order.

    Args:
        seq_length: tokens of the sequence, of all context-parallel ranks together.
        slices: number of slices n.
        strategy: slices of equal length (``uniform``) or of equal work (``balanced``).
        work: of the sequence; by default every token has the same.

    Raises:
        ValueError: if the sequence cannot be cut in this way.
    """
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
            f"--num-seq-splits {slices} with --seq-split-strategy balanced cuts into multiples of "
            f"{TOKENS} tokens, and --seq-length {seq_length} has no {slices} of them: take a "
            f"sequence of at least {max(slices, 1) * TOKENS} tokens, a multiple of {TOKENS}, or "
            "--seq-split-strategy uniform"
        )
    ends, whole = [0], work(seq_length)
    for k in range(1, slices):
        place = bisect_left(range(seq_length + 1), whole * k / slices, key=work)
        nearest = round(place / TOKENS)
        # At least one block for this slice, and one for each slice after it.
        ends.append(min(max(nearest, ends[-1] + 1), blocks - (slices - k)))
    return tuple(TOKENS * (end - begin) for begin, end in pairwise([*ends, blocks]))


def causal_work(seq_length: int, attention: float) -> Work:
    """Return the function from a number of first tokens to their work.

    The work of the whole sequence is 1. A query reads all keys before it.

    Args:
        seq_length: tokens of the sequence.
        attention: the share of the work of the whole sequence that attention takes; 0 to 1. The
            rest is the same for every token.
    """
    assert 0 <= attention <= 1, f"{attention} is no share"

    def work(tokens: int) -> float:
        part = tokens / seq_length
        return (1 - attention) * part + attention * part**2

    return work


def slice_shares(lengths: Sequence[int], attention: float = 0.0) -> tuple[float, ...]:
    """Return the share of the work of the whole sequence that each slice has.

    Args:
        lengths: the lengths of the slices.
        attention: as for ``causal_work``.
    """
    work = causal_work(sum(lengths), attention)
    return tuple(work(end) - work(begin) for begin, end in pairwise(accumulate(lengths, initial=0)))
