"""The slopes of ALiBi: how fast the scores of each head fall with distance (arXiv 2108.12409)."""


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """Return a slope for every head.

    If the number of heads is a power of two, the slopes are the geometric sequence from
    ``2 ** (-8 / heads)`` to ``2 ** -8``. Otherwise let L be the next lower power of two. The first
    L heads have the sequence of L, and the others have every second slope of the sequence of 2 L,
    as in the paper's code and in BLOOM.

    Args:
        num_heads: query heads a of the whole model.
    """
    lower = 1 << (num_heads.bit_length() - 1)
    return (*_sequence(lower), *_sequence(2 * lower)[: 2 * (num_heads - lower) : 2])


def _sequence(heads: int) -> tuple[float, ...]:
    return tuple(2.0 ** (-8 * (head + 1) / heads) for head in range(heads))
