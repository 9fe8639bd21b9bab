"""Looks at what the passes compute, to find out where infinity or NaN appears first."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

Sighting = tuple[int, int, str]
"""(microbatch, place in the data flow, what) of an infinity or NaN."""


class NonFiniteDetector:
    """One rank's lookout; it looks only while somebody wants to know."""

    def __init__(self) -> None:
        self._sightings: list[Sighting] | None = None

    @contextmanager
    def keeping(self) -> Iterator[list[Sighting]]:
        """Look at everything shown, and list where infinity or NaN appears.

        Costs a synchronisation per pass: for finding out, not for training.
        """
        self._sightings = []
        try:
            yield self._sightings
        finally:
            self._sightings = None

    def check(self, microbatch: int, place: int, what: str, *values: Tensor) -> None:
        """Note ``what`` if any of ``values`` is not finite."""
        if self._sightings is not None and not all(bool(v.isfinite().all()) for v in values):
            self._sightings.append((microbatch, place, what))
