"""Marks of cases."""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial

import pytest

full = partial(pytest.param, marks=pytest.mark.full)
"""A case that a default run leaves out: others show the same property, or it takes long."""


def leave_to_full(items: Sequence[pytest.Item]) -> None:
    """Mark cases of tests with ``one_in(n)`` as ``full``, all but every n-th of those that are not.

    Where several parameters are crossed, a case stays as well if it is the first with some value.
    """
    tests: dict[tuple[str, str], list[pytest.Function]] = defaultdict(list)
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if isinstance(item, pytest.Function) and "one_in" in marks and "full" not in marks:
            tests[item.path.as_posix(), item.originalname].append(item)
    for cases in tests.values():
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
