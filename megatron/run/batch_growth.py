"""Reads the words behind the flags that let batches grow."""

from collections.abc import Sequence
from itertools import pairwise

from megatron.data.batch_sizes import Rampup, SizeSteps
from megatron.flags.ranges import LARGEST


def _whole(word: str) -> int:
    """Return a whole number; of more digits than any flag may have: a ``ValueError``."""
    number = int(word)
    if abs(number) > LARGEST:
        raise ValueError(f"{word} is too large")
    return number


def parse_rampup(words: Sequence[str], last: int, unit: int) -> Rampup | None:
    """Read START, INCREMENT and SAMPLES, the words behind ``--rampup-batch-size``.

    Args:
        words: the words behind the flag; empty: batches do not grow.
        last: samples of the last batch.
        unit: samples of a microbatch.

    Raises:
        ValueError: the words describe no growth to ``last``. The message begins with the flag.
    """
    if not words:
        return None
    given = f"--rampup-batch-size {' '.join(words)}"
    try:
        start, increment, samples = map(_whole, words)
    except ValueError as error:
        raise ValueError(
            f"{given}: give three whole numbers: samples of the first batch, samples by which "
            "batches grow at a time, and samples over which they grow"
        ) from error
    if min(start, increment, samples) < 1:
        raise ValueError(f"{given}: all three must be at least 1")
    if start >= last or (last - start) % increment:
        raise ValueError(
            f"{given}: batches do not come from {start} to --global-batch-size {last} by steps of "
            f"{increment}: make the difference a multiple of the second number"
        )
    made = Rampup(start, increment, samples)
    if not made.are_multiples(unit):
        raise ValueError(
            f"{given}: not every batch is made of microbatches of {unit} (--micro-batch-size): "
            f"make the first two numbers multiples of {unit}"
        )
    return made


def parse_size_steps(words: Sequence[str], last: int, unit: int) -> SizeSteps | None:
    """Read pairs BEGIN:SIZE, the words behind ``--batch-size-steps``.

    One word may hold several pairs, with spaces or commas between them. Arguments and errors are as
    in ``parse_rampup``.
    """
    if not words:
        return None
    given = f"--batch-size-steps {' '.join(words)}"
    entries = " ".join(words).replace(",", " ").split()
    try:
        steps = [(_whole(begin), _whole(size)) for begin, size in (e.split(":") for e in entries)]
    except ValueError as error:
        raise ValueError(
            f"{given}: give pairs SAMPLES:SIZE of whole numbers, the samples after which batches "
            "have that size"
        ) from error
    begins, sizes = tuple(zip(*steps, strict=True)) or ((), ())
    rises = all(a < b for own in (begins, sizes) for a, b in pairwise(own))
    if not steps or begins[0] != 0 or sizes[0] < 1 or not rises:
        raise ValueError(
            f"{given}: the first pair begins at 0 samples, and from pair to pair both numbers rise"
        )
    if sizes[-1] != last:
        raise ValueError(
            f"{given}: the last size is not --global-batch-size {last}: make the two the same"
        )
    made = SizeSteps(begins, sizes)
    if not made.are_multiples(unit):
        raise ValueError(
            f"{given}: not every batch is made of microbatches of {unit} (--micro-batch-size): "
            f"make all sizes multiples of {unit}"
        )
    return made
