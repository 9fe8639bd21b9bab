"""How many samples an iteration has: always the same, or more and more at the start of a run.

The meaning is that of Megatron's ``--rampup-batch-size``: the size depends on the samples consumed
so far, and on nothing else.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from sys import maxsize


@dataclass(frozen=True)
class Rampup:
    """Batches that grow.

    Attributes:
        start: samples of the first batch.
        increment: samples by which batches grow at a time.
        samples: consumed samples after which batches grow no more.
    """

    start: int
    increment: int
    samples: int


@dataclass(frozen=True)
class BatchSizes:
    """The sizes of a run's global batches, in samples.

    Attributes:
        final: once batches grow no more.
        rampup: how they grow before; ``None``: they do not.
    """

    final: int
    rampup: Rampup | None = None

    def at(self, consumed: int) -> int:
        """Return the size of the batch that begins after ``consumed`` samples."""
        rampup = self.rampup
        if rampup is None or consumed > rampup.samples:
            return self.final
        increments = (self.final - rampup.start) // rampup.increment
        done = int(consumed / (rampup.samples / increments))  # in Megatron's order of operations
        return rampup.start + done * rampup.increment

    def iterations(self, samples: int, consumed: int = 0) -> int:
        """Return how many whole batches fit into a run of ``samples``, ``consumed`` of them gone.

        A rest that is less than a batch is not used.
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
        """Yield the sizes from ``consumed`` on, and how many batches have each; the last: all."""
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
