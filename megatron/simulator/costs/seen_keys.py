"""The keys and values of a slice of a microbatch, and of the slices before it, in bytes and copies.

A part of the closed form of a dense GPT (``dense_gpt.py``). The mechanism is in
``layers/slices.py``: a buffer of each layer has the keys and values of all slices of a microbatch.
Another buffer has the gradients that the backward of a slice leaves to earlier slices.
"""

from typing import NamedTuple

from megatron.simulator.costs.count import FULL, HALF, Launch


def others(kernels: int, size: int) -> tuple[Launch, ...]:
    """Return so many kernels without products, which move ``size`` bytes together."""
    return (Launch("others", size // kernels),) * kernels


class SeenKeys(NamedTuple):
    """The keys and values of a layer that the queries of a slice see.

    Attributes:
        number: number of the slice.
        slices: slices of the microbatch; 1: it is whole.
        tokens: tokens of the slice, of all samples.
        channels: of the keys of a token; its values have as many.
    """

    number: int
    slices: int
    tokens: int
    channels: int

    @property
    def is_last(self) -> bool:
        """Whether no slice follows."""
        return self.number == self.slices - 1

    @property
    def earlier(self) -> int:
        """Keys and values of earlier slices, in numbers."""
        return 2 * self.number * self.tokens * self.channels

    @property
    def own(self) -> int:
        """Keys and values of the slice, in numbers."""
        return 2 * self.tokens * self.channels

    @property
    def scores(self) -> int:
        """Scores of a head that attention counts: the later half of the slice's own is not seen."""
        return (2 * self.number + 1) * self.tokens

    def put(self) -> tuple[Launch, ...]:
        """Return the copies of keys and of values into the buffer of the microbatch."""
        return others(2, 3 * HALF * self.own) if self.slices > 1 else ()

    def settled(self) -> tuple[Launch, ...]:
        """Return the sums of gradients of own keys, and of gradients left to earlier slices."""
        found: tuple[Launch, ...] = ()
        if not self.is_last:
            found += others(4, (3 * FULL + 2 * HALF) * self.own)
        if self.number:
            found += others(2, (2 * FULL + HALF) * self.earlier)
            found += others(1, FULL * self.earlier) * self.is_last
        return found

    @property
    def taken(self) -> int:
        """Bytes of the buffer of keys and values, which the first slice's F takes."""
        return HALF * self.own * self.slices * (self.number == 0 and self.slices > 1)

    @property
    def left(self) -> int:
        """Change of the buffers' bytes in B: the last slice takes one, the first frees both."""
        if self.slices == 1 or 0 < self.number < self.slices - 1:
            return 0
        gradients = FULL * self.own * (self.slices - 1)
        return gradients if self.is_last else -gradients - self.taken
