"""A curve of a few rows of characters, and the bounded history behind it."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

EIGHTHS: Final = " ▁▂▃▄▅▆▇█"
"""Bars of zero to eight eighths of a row."""

_LABEL: Final = 12
"""Characters before the bars."""


class History:
    """The means of consecutive values, as many as there is room for; it forgets no value.

    Whenever it is full, neighbours are merged in pairs.

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
        """The means, the last one perhaps of fewer values."""
        last = [sum(self._open) / len(self._open)] if self._open else []
        return self._means + last


def plot(values: Sequence[float], width: int, height: int) -> list[str]:
    """Return rows of characters, the top one first, with a bar for every column.

    Args:
        values: finite; if there are more than columns, a column stands for the mean of several.
        width: of a row, at least 20 characters.
        height: rows, at least two.

    Returns:
        ``height`` rows; the lowest column has a bar of one eighth of a row, the highest a full one.
        What they stand for is written before the first and the last row.
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
    """Return at most ``width`` means of consecutive values, of as equally many as possible."""
    count = min(width, len(values))
    bounds = [len(values) * i // count for i in range(count + 1)] if count else []
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(bounds)]
