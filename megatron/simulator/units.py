"""Times and bytes in the unit that suits their size, so that no small number is shown as 0.0."""

from collections.abc import Sequence
from math import inf
from typing import Final, NamedTuple


class Unit(NamedTuple):
    """A unit by its name, with its size in seconds or in bytes."""

    name: str
    size: float


class Scale(NamedTuple):
    """The units of one quantity.

    Attributes:
        units: the units, from the largest to the smallest.
        least: a number smaller than this is written in a smaller unit, if there is one.
        decimals: digits after the decimal point.
    """

    units: Sequence[Unit]
    least: float
    decimals: int

    def unit(self, *values: float) -> Unit:
        """Return the largest unit in which all ``values`` except zeros are at least ``least``."""
        smallest = min((value for value in values if value > 0), default=inf)
        large = (unit for unit in self.units if smallest >= self.least * unit.size)
        return next(large, self.units[-1])

    def number(self, value: float, unit: Unit) -> str:
        """Return ``value``, converted to ``unit``, as text without the unit's name."""
        return f"{value / unit.size:.{self.decimals}f}"

    def write(self, value: float) -> str:
        """Return ``value`` as text, with the unit that suits it."""
        unit = self.unit(value)
        return f"{self.number(value, unit) if value else 0} {unit.name}"


TIME: Final = Scale((Unit("s", 1.0), Unit("ms", 1e-3), Unit("us", 1e-6)), 0.1, 3)
"""Seconds."""
MEMORY: Final = Scale(
    (Unit("GiB", 2.0**30), Unit("MiB", 2.0**20), Unit("KiB", 2.0**10), Unit("B", 1.0)), 1.0, 1
)
"""Bytes."""


def percent(share: float) -> str:
    """Return a share in percent with one decimal; a share that would read 0.0 has two digits."""
    return f"{share:.1%}" if share >= 0.0005 or share <= 0 else f"{100 * share:.2g}%"
