"""A curve of a few rows of characters, and the bounded history behind it."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

EIGHTHS: Final = " ▁▂▃▄▅▆▇█"
"""Bars of zero to eight eighths of a row."""

_LABEL: Final = 12
"""Characters before the bars."""


class History:
    """The means of consecutive values; a value that is added always counts in one of them.

    When there is no more room, neighbouring means are merged in pairs.

    Args:
        room: the most means that are kept, an even number.
    """

    def __init__(self, room: int = 512) -> None:
        self._room = room
        self._means: list[float] = []
        self._of_each = 1  # values in a mean
        self._open: list[float] = []

    def add(self, value: float) -> None:
        """Take another value."""
        self._open.append(value)
        if len(self._open) == self._of_each:
            self._means.append(sum(self._open) / self._of_each)
            self._open = []
        if len(self._means) == self._room:
            pairs = zip(self._means[::2], self._means[1::2], strict=True)
            self._means = [(one + other) / 2 for one, other in pairs]
            self._of_each *= 2

    @property
    def means(self) -> list[float]:
        """The means; the last mean may be of fewer values."""
        last = [sum(self._open) / len(self._open)] if self._open else []
        return self._means + last


def plot(values: Sequence[float], width: int, height: int) -> list[str]:
    """Return rows of characters, the top one first, with a bar for every column.

    Args:
        values: finite values; if there are more values than columns, a column is a mean of several.
        width: characters of a row, at least 20.
        height: number of rows, at least two.

    Returns:
        ``height`` rows. The bar of the lowest column is one eighth of a row high, and the bar of
        the highest column fills all rows. The highest value stands before the first row, and the
        lowest value before the last row.
    """
    columns = _squeezed(values, width - _LABEL)
    if not columns:
        return [""] * height
    low, high = min(columns), max(columns)
    eighths = 8 * height - 1
    bars = [1 + (round((c - low) / (high - low) * eighths) if high > low else 0) for c in columns]
    labels = [f"{high:.4g}", *[""] * (height - 2), f"{low:.4g}"]
    return [
        f"{label:>{_LABEL - 1}} " + "".join(EIGHTHS[min(8, max(0, bar - 8 * row))] for bar in bars)
        for label, row in zip(labels, reversed(range(height)), strict=True)
    ]


def _squeezed(values: Sequence[float], width: int) -> list[float]:
    """Return at most ``width`` means of consecutive values, in groups as equal as possible."""
    count = min(width, len(values))
    bounds = [len(values) * i // count for i in range(count + 1)] if count else []
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(bounds)]
