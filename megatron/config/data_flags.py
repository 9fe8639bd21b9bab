"""The flags with a grammar: of ``--data-path``, ``--split`` and batches that grow."""

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from megatron.config.run_config import EvaluationSet
from megatron.data.batch_sizes import Rampup, SizeSteps
from megatron.data.config import Blend


def parse_data_path(words: Sequence[str], source: str = "--data-path") -> Blend:
    """Read the words after ``--data-path``.

    Args:
        words: one prefix, or pairs of a weight and a prefix; no words in a dry run.
        source: the flag that gives them.

    Returns:
        ``(weight, prefix)`` pairs; a lone prefix has weight 1.

    Raises:
        ValueError: the words are not pairs, or a weight is not a positive number.
    """
    if len(words) == 1:
        return ((1.0, Path(words[0])),)
    if len(words) % 2:
        raise ValueError(
            f"{source} {' '.join(words)}: {len(words)} words make no WEIGHT PREFIX pairs; give "
            "one prefix, or a weight before every prefix"
        )
    blend = tuple(
        (_weight(weight, source), Path(prefix))
        for weight, prefix in zip(words[::2], words[1::2], strict=True)
    )
    if sum(weight for weight, _ in blend) == math.inf:
        raise ValueError(
            f"{source} {' '.join(words)}: the sum of the weights is infinite; give smaller ones"
        )
    return blend


def _weight(word: str, source: str) -> float:
    weight = _number(word)
    if not 0 < weight < math.inf:
        raise ValueError(
            f"{source}: {word!r} stands where a weight is expected, a number greater than 0; "
            "give WEIGHT PREFIX pairs"
        )
    return weight


def parse_split(text: str) -> tuple[float, float, float]:
    """Read ``--split``.

    Args:
        text: up to three numbers on any scale, separated by commas or slashes; missing shares
            are 0.

    Returns:
        Shares of train, valid and test.

    Raises:
        ValueError: the text has another form, or nothing is left to train on.
    """
    shares = [_number(word) for word in text.replace("/", ",").split(",")]
    if len(shares) > 3 or not min(shares) >= 0 or not 0 < shares[0] <= sum(shares) < math.inf:
        raise ValueError(
            f"--split {text}: give shares for training, validation and test, at least 0 and the "
            "first above it, for example 969,30,1"
        )
    train, valid, test = (*shares, 0.0, 0.0)[:3]
    return train, valid, test


def evaluation_sets(text: str) -> tuple[EvaluationSet, ...]:
    """Return the sets for which a ``--split`` leaves documents; all if there is a fault in it."""
    try:
        _, valid, test = parse_split(text)
    except ValueError:
        return ("validation", "test")
    shares: tuple[tuple[EvaluationSet, float], ...] = (("validation", valid), ("test", test))
    return tuple(name for name, share in shares if share > 0)


def _number(word: str) -> float:
    """Return the number that a word stands for; NaN if the word is no number."""
    try:
        return float(word)
    except ValueError:
        return math.nan


def parse_rampup(words: Sequence[str], last: int, unit: int) -> Rampup | None:
    """Read how batches grow: START, INCREMENT and SAMPLES.

    Args:
        words: behind the flag; none: batches do not grow.
        last: samples of the last batch.
        unit: samples of a microbatch.

    Raises:
        ValueError: batches cannot grow so; the message begins with the flag.
    """
    if not words:
        return None
    given = f"--rampup-batch-size {' '.join(words)}"
    try:
        start, increment, samples = map(int, words)
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
    """Read the sizes of batches: BEGIN:SIZE for each; arguments and errors as of ``parse_rampup``.

    Several may be in one word, with spaces or commas between them.
    """
    if not words:
        return None
    given = f"--batch-size-steps {' '.join(words)}"
    entries = " ".join(words).replace(",", " ").split()
    try:
        steps = [(int(begin), int(size)) for begin, size in (e.split(":") for e in entries)]
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
