"""Sets of cases in which every pair of values of two factors occurs."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Case = Mapping[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairs_of(case: Case) -> set[Pair]:
    """The pairs of values in a case."""
    return set(combinations(sorted(case.items(), key=lambda item: item[0]), 2))


def cover(factors: Mapping[str, Sequence[Any]], allowed: Callable[[Case], bool]) -> list[Case]:
    """Cases that have every pair which an allowed case has; few, but not the fewest.

    Each next case is the one that adds the most pairs, the first such in the order of the product.
    """
    cases = [dict(zip(factors, values, strict=True)) for values in product(*factors.values())]
    bits: dict[Pair, int] = {}  # a set of pairs is an int, because there are thousands of them
    candidates = [
        (case, sum(1 << bits.setdefault(pair, len(bits)) for pair in pairs_of(case)))
        for case in cases
        if allowed(case)
    ]
    missing = (1 << len(bits)) - 1
    chosen: list[Case] = []
    while missing:
        case, pairs = max(candidates, key=lambda candidate: (candidate[1] & missing).bit_count())
        chosen.append(case)
        missing &= ~pairs
    return chosen
