"""The two data flags that have a grammar: ``--data-path`` and ``--split``."""

import math
from collections.abc import Sequence
from pathlib import Path

from megatron.config.run_config import EvaluationSet


def parse_data_path(words: Sequence[str]) -> tuple[tuple[float, Path], ...]:
    """Read the words after ``--data-path``.

    Args:
        words: one prefix, or pairs of a weight and a prefix; no words in a dry run.

    Returns:
        ``(weight, prefix)`` pairs; a lone prefix has weight 1.

    Raises:
        ValueError: the words are not pairs, or a weight is not a positive number.
    """
    if len(words) == 1:
        return ((1.0, Path(words[0])),)
    if len(words) % 2:
        raise ValueError(
            f"--data-path {' '.join(words)}: {len(words)} words make no WEIGHT PREFIX pairs; give "
            "one prefix, or a weight before every prefix"
        )
    return tuple(
        (_weight(weight), Path(prefix))
        for weight, prefix in zip(words[::2], words[1::2], strict=True)
    )


def _weight(word: str) -> float:
    weight = _number(word)
    if not 0 < weight < math.inf:
        raise ValueError(
            f"--data-path: {word!r} stands where a weight is expected, a number greater than 0; "
            "give WEIGHT PREFIX pairs"
        )
    return weight


def parse_split(text: str) -> tuple[float, float, float]:
    """Read ``--split``.

    Args:
        text: up to three numbers on any scale, separated by commas or slashes; missing shares
            are 0.

    Returns:
        Shares of train, valid and test.

    Raises:
        ValueError: the text has another form, or nothing is left to train on.
    """
    shares = [_number(word) for word in text.replace("/", ",").split(",")]
    if len(shares) > 3 or not all(0 <= share < math.inf for share in shares) or shares[0] == 0:
        raise ValueError(
            f"--split {text}: give shares for training, validation and test, at least 0 and the "
            "first above it, for example 969,30,1"
        )
    train, valid, test = (*shares, 0.0, 0.0)[:3]
    return train, valid, test


def evaluation_sets(text: str) -> tuple[EvaluationSet, ...]:
    """Return the sets for which a ``--split`` leaves documents; all if there is a fault in it."""
    try:
        _, valid, test = parse_split(text)
    except ValueError:
        return ("validation", "test")
    shares: tuple[tuple[EvaluationSet, float], ...] = (("validation", valid), ("test", test))
    return tuple(name for name, share in shares if share > 0)


def _number(word: str) -> float:
    """Return the number that a word stands for; NaN if the word is no number."""
    try:
        return float(word)
    except ValueError:
        return math.nan
