"""Amounts of tokens in words: ``4M``, ``1.5T``."""

import re
from decimal import Decimal
from math import ceil, floor
from typing import Final

from megatron.flags.ranges import up_to

SIZES: Final = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
"""What a letter behind a number multiplies it with."""

MOST_TOKENS: Final = up_to(10**16)
"""Tokens of a training; a hundred times as many as anybody has trained on."""

_FORM: Final = re.compile(r"(\d{1,18}(?:\.\d{1,12})?)([kmbgt]?)", re.IGNORECASE)


def tokens_of(word: str) -> int:
    """Return the tokens of a word, such as 4M (4,000,000) or 1.5T.

    Raises:
        ValueError: the word is no whole number of tokens, or a number that nobody means.
    """
    found = _FORM.fullmatch(word)
    count = Decimal(found[1]) * SIZES[found[2].lower()] if found else Decimal(0)
    if not found or count != int(count):
        raise ValueError("give a number of tokens, alone or with k, M, B or T, as 4M or 1.5T")
    if not MOST_TOKENS.contains(int(count)):
        raise ValueError(f"must be {MOST_TOKENS.words}")
    return int(count)


WITHIN: Final = 0.05
"""Share by which a batch in samples may differ from the tokens that are asked for. 2^20 is 4.9 %
more than a million: who asks for 4M tokens often means 4,194,304."""


def samples_of(tokens: int, seq_length: int) -> int:
    """Return the samples of a batch of about this many tokens.

    They are exactly as many tokens if that is a number of samples. Otherwise they are the number
    within ``WITHIN`` of the tokens that the highest power of two divides, and of these the nearest:
    many layouts divide it.

    Raises:
        ValueError: no number of samples is as near; the message names the nearest one.
    """
    if tokens % seq_length == 0:
        return tokens // seq_length
    wanted = tokens / seq_length
    least, most = ceil(wanted * (1 - WITHIN)), floor(wanted * (1 + WITHIN))
    if most < max(1, least):
        nearest = max(1, round(wanted))
        raise ValueError(
            f"{tokens:,} tokens are no whole number of samples of {seq_length:,}: give "
            f"{nearest * seq_length}, or --global-batch-size in samples"
        )
    power = 1
    while most // (2 * power) * 2 * power >= least:
        power *= 2
    multiples = range(ceil(least / power) * power, most + 1, power)
    return min(multiples, key=lambda samples: abs(samples - wanted))
