"""Marks of cases."""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from itertools import combinations

import pytest

full = partial(pytest.param, marks=pytest.mark.full)
"""A case that a default run leaves out: others show the same property, or it takes long."""


_Pair = tuple[tuple[str, int], ...]


def keep_pairs(items: list[pytest.Item]) -> list[pytest.Item]:
    """Take away, and return, cases of ``pairwise`` tests whose pairs of values are all in others.

    What is left of crossed parameters has every pair of values of two parameters: of each test, the
    case that adds the most pairs is taken, the first of them, until no pair is missing.
    """
    kept: set[pytest.Item] = set()
    for cases in _with_mark(items, "pairwise").values():
        pairs = {case: _pairs_of(case) for case in cases}
        missing = set[_Pair]().union(*pairs.values())
        assert missing, f"{cases[0].nodeid} has no two parameters of which pairs could be kept"
        while missing:
            best = max(cases, key=lambda case: len(pairs[case] & missing))
            kept.add(best)
            missing -= pairs[best]
    needless = {own: None for own in items if own not in kept and _has_mark(own, "pairwise")}
    items[:] = [own for own in items if own not in needless]
    return [*needless]


def _pairs_of(case: pytest.Function) -> set[_Pair]:
    """Return the pairs of values of a case, each value by the name of its parameter and its id."""
    values = sorted((name, id(value)) for name, value in case.callspec.params.items())
    return set(combinations(values, 2))


def _has_mark(item: pytest.Item, name: str) -> bool:
    return item.get_closest_marker(name) is not None


def _with_mark(
    items: Sequence[pytest.Item], name: str
) -> dict[tuple[str, str], list[pytest.Function]]:
    """Return the cases with a mark, by the file and the name of their tests."""
    tests: dict[tuple[str, str], list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and _has_mark(item, name):
            tests[item.path.as_posix(), item.originalname].append(item)
    return tests


def leave_to_full(items: Sequence[pytest.Item]) -> None:
    """Mark cases of tests with ``one_in(n)`` as ``full``, all but every n-th of those that are not.

    Where several parameters are crossed, a case stays as well if it is the first with some value.
    """
    usual = [item for item in items if not _has_mark(item, "full")]
    for cases in _with_mark(usual, "one_in").values():
        mark = cases[0].get_closest_marker("one_in")
        assert mark is not None
        [n] = mark.args
        crossed = sum(1 for _ in cases[0].iter_markers("parametrize")) > 1
        seen: set[tuple[str, int]] = set()
        for number, case in enumerate(cases):
            values = {(name, id(value)) for name, value in case.callspec.params.items()}
            if number % n == 0 or (crossed and values - seen):
                seen |= values
            else:
                case.add_marker(pytest.mark.full)
