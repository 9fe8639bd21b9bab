"""Ranks and samples in words."""

from collections.abc import Iterable


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Return ``rank 3`` or ``ranks 0-2, 5``."""
    runs: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        first, last = runs.pop() if runs and runs[-1][1] == rank - 1 else (rank, rank)
        runs.append((first, rank if first < rank else last))
    several = len(runs) > 1 or any(first < last for first, last in runs)
    spans = (str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank{'s' if several else ''} {', '.join(spans)}"


def samples_in_words(samples: range) -> str:
    """Return consecutive samples by their place in the order of training, counted from 0."""
    if len(samples) == 1:
        return f"sample {samples[0]}"
    return f"samples {samples[0]}-{samples[-1]}"
