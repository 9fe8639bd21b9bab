"""The numbers that flags may take: ranges by what they measure."""

import dataclasses

DIGITS = 18
"""Digits of the longest whole number that a flag may have. Such a number fits into 64 bits."""

LARGEST = 10**DIGITS - 1
"""Largest whole number that a flag may have."""


@dataclasses.dataclass(frozen=True)
class Range:
    """Numbers that a flag may take, as far as its meaning goes; NaN is in no range.

    Attributes:
        least: the smallest number.
        most: the largest number. ``LARGEST``: a whole number has no limit but that of its digits,
            because a larger number means "never", or "all".
        or_zero: whether 0 is allowed besides, because 0 turns the flag off.
    """

    least: float
    most: float
    or_zero: bool = False

    @property
    def words(self) -> str:
        """The range in words, to follow "must be"."""
        zero = "0, or " if self.or_zero else ""
        most = "" if self.most == LARGEST else f" and at most {_shown(self.most)}"
        return f"{zero}at least {_shown(self.least)}{most}"

    def contains(self, number: float) -> bool:
        """Return whether a number lies in the range."""
        return self.least <= number <= self.most or (self.or_zero and number == 0)


def _shown(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:,.15g}"


def up_to(most: int) -> Range:
    """Return the range of a size. A number above ``most`` is mistyped."""
    return Range(1, most)


COUNT = up_to(10**9)
"""Things that a run makes or goes through one by one."""
NOT_NEGATIVE = Range(0, 10**9)
"""The same, or none."""
INTERVAL = Range(1, LARGEST)
"""Iterations between two events; more than the run has: never."""
INTERVAL_OR_NONE = Range(0, LARGEST)
SAMPLES = up_to(10**12)
SAMPLES_OR_NONE = Range(0, 10**12)

POSITIVE = Range(1e-9, 1e9)
"""A measured quantity of a tool."""

SHARE = Range(0, 0.999999)
"""A share of something of which a part must remain."""
MEMORY = Range(0, 1 - 1e-9)
"""Share of a running mean that a step keeps; 1 would never learn anything."""
PERCENT = Range(1e-6, 1)
PROBABILITY = Range(0, 1)
FACTOR = Range(1e-4, 1e4)
"""Factor of activations, or of an update."""
STRETCH = Range(1, 1e6)
"""How many times as long something becomes."""
WEIGHT = Range(0, 1000)
"""Weight of a summand, such as a loss; 0: off."""
CAP = Range(0.01, 1e6)
"""Limit of magnitudes; all numbers beyond it become alike, and so a smaller cap leaves nothing."""
CAP_OR_OFF = Range(0.01, 1e6, or_zero=True)
EPSILON = Range(1e-20, 1)
"""Summand that keeps a divisor from 0. In fp32 it must not be 0 itself."""

THETA = up_to(10**12)
"""Base of RoPE's frequencies, whole or not."""

WIDTH = up_to(1 << 24)
LENGTH = up_to(1 << 30)
RANKS = up_to(1 << 16)
DEPTH = up_to(100_000)
"""Transformer layers, or stages."""
DEPTH_OR_NONE = Range(0, 100_000)
MINUTES = up_to(366 * 24 * 60)
SECONDS = Range(0, 366 * 24 * 3600)
PATIENCE = Range(0, 10**12)
"""Seconds after which something is given up; a large number means never."""
BANDWIDTH = Range(1e-3, 1e6)
"""GB/s in one direction; a number outside is in another unit, and plans would only wait."""
LATENCY = Range(0, 1e5)
"""Microseconds that a step on a link takes besides the time of its bytes."""
SEED = Range(0, (1 << 32) - 1)
