"""Columns of numbers over the iterations of a run, and the few rows that a screen can show.

Of every column of pixels four rows are kept: the first, the last, the least and the greatest. A
line through these rows colours the same pixels as a line through all rows, so no spike is lost.
"""

from array import array
from bisect import bisect_right
from collections.abc import Mapping
from math import nan
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

KEPT: Final = 4
"""Rows of a column of pixels that are kept at most."""

MOST_COLUMNS: Final = 100
"""Columns of a table; names that come up later are left out, because records may name anything."""


class Table:
    """Rows in the order of their iterations; of two rows with one iteration, the later one counts.

    A value that a row lacks is NaN.

    Attributes:
        iterations: the iteration of every row.
    """

    def __init__(self) -> None:
        self.iterations = array("q")
        self._columns: dict[str, array[float]] = {}

    def __len__(self) -> int:
        return len(self.iterations)

    @property
    def names(self) -> list[str]:
        """The columns, in the order in which they came up."""
        return list(self._columns)

    def put(self, iteration: int, values: Mapping[str, float]) -> None:
        """Append a row; rows of this iteration and of later ones are dropped before."""
        if self.iterations and self.iterations[-1] >= iteration:
            self.cut(iteration - 1)
        for name in values:
            if name not in self._columns and len(self._columns) < MOST_COLUMNS:
                self._columns[name] = array("d", [nan]) * len(self)
        self.iterations.append(iteration)
        for name, column in self._columns.items():
            column.append(values.get(name, nan))

    def cut(self, iteration: int) -> None:
        """Drop the rows after an iteration."""
        end = bisect_right(self.iterations, iteration)
        del self.iterations[end:]
        for column in self._columns.values():
            del column[end:]

    def numbers(self, name: str) -> Numbers:
        """Return a copy of a column."""
        if name == "iteration":
            return np.array(self.iterations, dtype=np.float64)
        if name not in self._columns:
            return np.full(len(self), nan)
        return np.array(self._columns[name], dtype=np.float64)

    def newest(self, name: str) -> float:
        """Return the value of the last row; NaN if there is none."""
        column = self._columns.get(name)
        return column[-1] if column else nan


def thinned(x: Numbers, y: Numbers, low: float, high: float, columns: int) -> Indices:
    """Return the rows that a picture of a curve needs, in order.

    Args:
        x: where the rows stand; ascending, without NaN.
        y: their values, without NaN.
        low: left end of the picture.
        high: its right end.
        columns: its columns of pixels.

    Returns:
        At most ``KEPT * columns`` rows. The nearest rows outside of the picture are among them, so
        that lines leave it.
    """
    begin = max(0, int(np.searchsorted(x, low, "left")) - 1)
    end = min(len(x), int(np.searchsorted(x, high, "right")) + 1)
    if end - begin <= KEPT * columns:
        return np.arange(begin, end)
    edges = np.linspace(low, high, columns + 1)[1:-1]
    starts = np.unique(np.append(np.searchsorted(x[begin:end], edges) + begin, begin))
    starts = starts[starts < end]
    kept: list[Any] = []
    for first, after in zip(starts, [*starts[1:], end], strict=True):
        part = y[first:after]
        kept += (first, first + part.argmin(), first + part.argmax(), after - 1)
    return np.unique(np.array(kept, dtype=np.int64))
