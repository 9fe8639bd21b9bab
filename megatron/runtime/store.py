"""The activation store: everything that one pass leaves for another, by name and microbatch.

Passes keep tensors only here, so the store holds all memory that the schedule costs. Its count of
microbatches in flight is compared with the plan's count.
"""

from collections.abc import Hashable
from typing import Any, Final

_ACTIVATIONS: Final = ("graph", "weights")
"""Names of the values that F leaves for B, and that B leaves for W."""


class ActivationStore:
    """Values under (name, microbatch, place) keys; each is put once and taken once.

    Attributes:
        peak_in_flight: highest number of microbatch chunks that were between F and B, or between F
            and W if weight gradients are separate passes.
    """

    def __init__(self) -> None:
        self._values: dict[Hashable, Any] = {}
        self._in_flight = 0
        self.peak_in_flight = 0

    def put(self, name: str, microbatch: int, value: Any, place: int = 0) -> None:
        """Keep ``value`` until it is taken."""
        key = (name, microbatch, place)
        assert key not in self._values, f"{key} is there already"
        self._values[key] = value
        if name in _ACTIVATIONS:
            self._in_flight += 1
            self.peak_in_flight = max(self.peak_in_flight, self._in_flight)

    def get(self, name: str, microbatch: int, place: int = 0) -> Any:
        """Return a value and keep it."""
        return self._values[name, microbatch, place]

    def has(self, name: str, microbatch: int, place: int = 0) -> bool:
        """Return whether the store holds a value."""
        return (name, microbatch, place) in self._values

    def take(self, name: str, microbatch: int, place: int = 0) -> Any:
        """Return a value and remove it from the store."""
        if name in _ACTIVATIONS:
            self._in_flight -= 1
        return self._values.pop((name, microbatch, place))

    @property
    def in_flight(self) -> list[tuple[int, int]]:
        """Microbatch and chunk of every activation between F and B (or W), in order."""
        keys = (key for key in self._values if isinstance(key, tuple) and key[0] in _ACTIVATIONS)
        return sorted({(microbatch, chunk) for _, microbatch, chunk in keys})

    def __len__(self) -> int:
        """Return the number of values held."""
        return len(self._values)
