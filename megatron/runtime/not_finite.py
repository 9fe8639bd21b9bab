"""Checks the results of passes, to find where infinity or NaN appears first."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

Sighting = tuple[int, int, str]
"""(microbatch, place in the data flow, name of the value) of an infinity or NaN."""


class NonFiniteDetector:
    """Checks one rank's values, and only within a ``keeping`` context."""

    def __init__(self) -> None:
        self._sightings: list[Sighting] | None = None

    @property
    def is_keeping(self) -> bool:
        """Whether values are checked."""
        return self._sightings is not None

    @contextmanager
    def keeping(self) -> Iterator[list[Sighting]]:
        """Check all values that are given to ``check``, and list values with infinity or NaN.

        Each pass then costs a synchronisation, so training runs without it.
        """
        self._sightings = []
        try:
            yield self._sightings
        finally:
            self._sightings = None

    def check(self, microbatch: int, place: int, what: str, *values: Tensor) -> None:
        """Note the name ``what`` if any of ``values`` is not finite."""
        if self._sightings is not None and not all(bool(v.isfinite().all()) for v in values):
            self._sightings.append((microbatch, place, what))
