"""The limit of a plan by memory, as flags give it: the bytes that the tensors of a rank may take.

A share of a rank's memory and a number of GiB are two forms of one limit. Each form knows its flag,
its bytes, and how much more of it a rank would need.
"""

from dataclasses import dataclass
from math import ceil
from typing import ClassVar, Final

PENDING_FLAG: Final = "--zero-bubble-max-pending-backward"
"""The flag that limits the microbatches in flight by their number."""

PERCENT_FLAG: Final = "--zero-bubble-adaptive-memory-limit-percentile"
"""The flag that limits the microbatches in flight by a share of the memory."""

GIB_FLAG: Final = "--zero-bubble-memory-limit-gib"
"""The flag that limits the microbatches in flight by bytes."""

_GIB: Final = 2**30
_STEPS: Final = 100
"""Parts of a GiB: the GiB that a message advises are a whole number of these parts."""
_NEARLY: Final = 1e-9
"""A number above a whole number by no more than this counts as the whole number."""


@dataclass(frozen=True)
class Percent:
    """A limit as a share of a rank's memory, in percent."""

    flag: ClassVar[str] = PERCENT_FLAG
    number: float

    def __str__(self) -> str:
        return f"{self.flag} {self.number:g}"

    def bytes(self, memory: float) -> float:
        """Return the bytes of the limit on a rank with so many bytes of memory."""
        return self.number / 100 * memory

    def enough(self, needed: float, memory: float) -> str:
        """Return the least limit, in words, for ``needed`` bytes of a rank's memory."""
        return f"{ceil(100 * needed / memory - _NEARLY)} percent"


@dataclass(frozen=True)
class Gib:
    """A limit in GiB."""

    flag: ClassVar[str] = GIB_FLAG
    number: float

    def __str__(self) -> str:
        return f"{self.flag} {self.number:g}"

    def bytes(self, memory: float) -> float:
        """Return the bytes of the limit, which are the same whatever memory a rank has."""
        return self.number * _GIB

    def enough(self, needed: float, memory: float) -> str:
        """Return the least limit, in words, for ``needed`` bytes of a rank's memory."""
        return f"{ceil(_STEPS * needed / _GIB - _NEARLY) / _STEPS:g} GiB"


LimitByMemory = Percent | Gib
