"""Marks of cases, and the plugin of pytest that follows them.

Which cases a default run takes follows from a test alone: they are chosen where its cases are
made, before ``-k``, ``--lf`` or the name of a case selects some of them.
"""

from collections.abc import Generator, Sequence
from functools import partial
from itertools import combinations
from typing import TypeAlias

import pytest

full = partial(pytest.param, marks=pytest.mark.full)
"""A case that a default run leaves out: others show the same property, or it takes long."""

_Pair = tuple[tuple[str, int], ...]
_Made: TypeAlias = pytest.Item | pytest.Collector | list[pytest.Item | pytest.Collector] | None


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Generator[None, _Made, _Made]:
    """Of a test that says so, take a cover of pairs, and leave most cases to the full run."""
    made = yield
    if not isinstance(made, list):
        return made
    cases = [own for own in made if isinstance(own, pytest.Function)]
    if not cases or len(cases) < len(made):
        return made
    if _has_mark(cases[0], "pairwise"):
        cases = covering_pairs(cases)
    leave_to_full(cases)
    return [*cases]


def covering_pairs(cases: Sequence[pytest.Function]) -> list[pytest.Function]:
    """Return cases of a ``pairwise`` test that have every pair of values of two parameters.

    The case that adds the most pairs is taken, the first of them, until no pair is missing.
    """
    pairs = {case: _pairs_of(case) for case in cases}
    missing = set[_Pair]().union(*pairs.values())
    assert missing, f"{cases[0].nodeid} has no two parameters of which pairs could be kept"
    kept: set[pytest.Function] = set()
    while missing:
        best = max(cases, key=lambda case: len(pairs[case] & missing))
        kept.add(best)
        missing -= pairs[best]
    return [case for case in cases if case in kept]


def _pairs_of(case: pytest.Function) -> set[_Pair]:
    """Return the pairs of values of a case, each value by the name of its parameter and its id."""
    values = sorted((name, id(value)) for name, value in case.callspec.params.items())
    return set(combinations(values, 2))


def _has_mark(item: pytest.Item, name: str) -> bool:
    return item.get_closest_marker(name) is not None


def leave_to_full(cases: Sequence[pytest.Function]) -> None:
    """Mark cases of a test with ``one_in(n)`` as ``full``: of the others, all but every n-th.

    Where several parameters are crossed, a case stays as well if it is the first with some value.
    """
    usual = [case for case in cases if not _has_mark(case, "full")]
    mark = usual[0].get_closest_marker("one_in") if usual else None
    if mark is None:
        return
    [n] = mark.args
    crossed = sum(1 for _ in usual[0].iter_markers("parametrize")) > 1
    seen: set[tuple[str, int]] = set()
    for number, case in enumerate(usual):
        values = {(name, id(value)) for name, value in case.callspec.params.items()}
        if number % n == 0 or (crossed and values - seen):
            seen |= values
        else:
            case.add_marker(pytest.mark.full)
