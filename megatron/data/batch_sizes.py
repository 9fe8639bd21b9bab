"""How many samples an iteration has: a constant number, or a number that grows at the start.

Sizes grow as with Megatron's ``--rampup-batch-size`` and ``--step-batch-size-schedule``: the size
of a batch depends only on the number of samples consumed before it.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from sys import maxsize


@dataclass(frozen=True)
class Rampup:
    """Batches that grow by equal increments.

    Attributes:
        start: samples of the first batch.
        increment: samples by which batches grow at a time.
        samples: number of consumed samples after which batches stop growing.
    """

    start: int
    increment: int
    samples: int

    def at(self, consumed: int, final: int) -> int:
        """Return the batch size after ``consumed`` samples; ``final``: size after all growth."""
        if consumed > self.samples:
            return final
        increments = (final - self.start) // self.increment
        done = int(consumed / (self.samples / increments))  # in Megatron's order of operations
        return self.start + done * self.increment

    def are_multiples(self, unit: int) -> bool:
        """Return whether every batch is made of whole units."""
        return self.start % unit == 0 == self.increment % unit


@dataclass(frozen=True)
class SizeSteps:
    """Batches whose sizes are listed, each with the number of samples from which it holds.

    Attributes:
        begins: number of consumed samples from which each size holds, in rising order; the first
            is 0.
        sizes: samples of a batch, in rising order.
    """

    begins: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def samples(self) -> int:
        """Number of consumed samples after which batches stop growing."""
        return self.begins[-1]

    def at(self, consumed: int, final: int) -> int:
        """Return the batch size after ``consumed`` samples; ``final`` equals the last size."""
        return self.sizes[bisect_right(self.begins, consumed) - 1]

    def are_multiples(self, unit: int) -> bool:
        """Return whether every batch is made of whole units."""
        return all(size % unit == 0 for size in self.sizes)


Growth = Rampup | SizeSteps
"""How batches grow."""


@dataclass(frozen=True)
class BatchSizes:
    """The sizes of a run's global batches, in samples.

    Attributes:
        final: size of a batch once batches have stopped growing.
        rampup: how batches grow until then; ``None``: all have the final size.
    """

    final: int
    rampup: Growth | None = None

    def at(self, consumed: int) -> int:
        """Return the size of the batch that begins after ``consumed`` samples."""
        return self.final if self.rampup is None else self.rampup.at(consumed, self.final)

    def iterations(self, samples: int, consumed: int = 0) -> int:
        """Return how many whole batches a run of ``samples`` has left after ``consumed`` samples.

        Samples at the end that do not fill a batch stay unused.
        """
        count = 0
        for size, alike in self._phases(consumed):
            fitting = max(0, min(alike, (samples - consumed) // size))
            count += fitting
            consumed += fitting * size
            if fitting < alike:
                break
        return count

    def samples_of(self, iterations: int) -> int:
        """Return the samples of the first ``iterations`` batches together."""
        samples = 0
        for size, alike in self._phases(0):
            samples += min(alike, iterations) * size
            iterations -= min(alike, iterations)
            if not iterations:
                break
        return samples

    def _phases(self, consumed: int) -> Iterator[tuple[int, int]]:
        """Yield each size from ``consumed`` on and the number of its batches; the last: no end."""
        while (size := self.at(consumed)) < self.final:
            begin = consumed
            assert self.rampup is not None
            most = (self.rampup.samples - begin) // size + 2
            alike = 1 + bisect_left(
                range(1, most), 1, key=lambda n: self.at(begin + n * size) > size
            )
            yield size, alike
            consumed += alike * size
        yield self.final, maxsize
