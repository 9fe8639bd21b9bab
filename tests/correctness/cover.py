"""Sets of cases in which every pair of values of two factors occurs."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, islice, product
from random import Random
from typing import Any, Final

TRIES: Final = 60

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


def sampled_cover(
    factors: Mapping[str, Sequence[Any]],
    allowed: Callable[[Case], bool],
    cost: Callable[[Case], float] = lambda case: 1.0,
) -> list[Case]:
    """A cover for factors whose product is too large to be gone through.

    For the first pair that is missing, random cases with this pair are drawn; the one that adds the
    most pairs for its cost is taken. A pair is left out if none of ``TRIES`` squared cases with it
    is allowed.
    """
    random = Random(0)
    missing: dict[Pair, None] = {
        (first, second): None
        for (one, its), (other, others) in combinations(sorted(factors.items()), 2)
        for first in ((one, value) for value in its)
        for second in ((other, value) for value in others)
    }
    chosen: list[Case] = []
    while missing:
        pair = next(iter(missing))
        drawn = (
            {name: random.choice(values) for name, values in factors.items()} | dict(pair)
            for _ in range(TRIES**2)
        )
        candidates = list(islice(filter(allowed, drawn), TRIES))
        if not candidates:
            del missing[pair]
            continue
        best = max(candidates, key=lambda case: len(pairs_of(case) & missing.keys()) / cost(case))
        chosen.append(best)
        for found in pairs_of(best):
            missing.pop(found, None)
    return chosen
