"""Which cases a default run leaves to the full one."""

from itertools import combinations, product

import pytest
from harness import marks

pytest_plugins = ["pytester"]


def write(pytester: pytest.Pytester, decorators: str, arguments: str, body: str = "pass") -> None:
    """Write one test with these decorators."""
    pytester.makeini("[pytest]\nmarkers =\n  full\n  one_in(n)\n  pairwise\n")
    pytester.makepyfile(
        test_it=f"import pytest\n{decorators}\ndef test_it({arguments}):\n    {body}\n"
    )


def taken(pytester: pytest.Pytester, *selection: str) -> list[str]:
    """Run a selection of the cases; return the values of those that ran."""
    done = pytester.inline_run(*selection, plugins=[marks])
    reports = done.getreports("pytest_runtest_logreport")
    ids = [report.nodeid for report in reports if report.when == "call"]
    return [own.partition("[")[2].rstrip("]") for own in ids]


def taken_by_default(pytester: pytest.Pytester, decorators: str, arguments: str) -> list[str]:
    """Return what a default run takes of one test with these decorators."""
    write(pytester, decorators, arguments)
    return taken(pytester, "-m", "not full")


@pytest.mark.parametrize(
    ("decorators", "arguments", "kept"),
    [
        ('@pytest.mark.parametrize("a", range(7))', "a", ["0", "3", "6"]),
        ('@pytest.mark.parametrize(("a", "b"), [(0, 1), (1, 2)])', "a, b", ["0-1"]),
        (
            '@pytest.mark.parametrize("a", [pytest.param(0, marks=pytest.mark.full), 1, 2])',
            "a",
            ["1"],
        ),
        (
            '@pytest.mark.parametrize("a", range(2))\n@pytest.mark.parametrize("b", range(4))',
            "a, b",
            ["0-0", "0-1", "1-0", "1-1", "2-0", "3-0"],
        ),
    ],
    ids=["every third", "two that go together", "one is full anyway", "no value is missing"],
)
def test_one_in_three(
    decorators: str, arguments: str, kept: list[str], pytester: pytest.Pytester
) -> None:
    found = taken_by_default(pytester, f"@pytest.mark.one_in(3)\n{decorators}", arguments)
    assert sorted(found) == sorted(kept)


def crossed(names: str) -> str:
    """Return the decorators of a test whose arguments are 0, 1 and 2, in every combination."""
    return "\n".join(f'@pytest.mark.parametrize("{name}", range(3))' for name in names)


def test_every_pair_of_values_is_kept_and_few_cases(pytester: pytest.Pytester) -> None:
    found = taken_by_default(pytester, f"@pytest.mark.pairwise\n{crossed('abcd')}", "a, b, c, d")
    cases = [tuple(own.split("-")) for own in found]
    for one, other in combinations(range(4), 2):
        assert {(own[one], own[other]) for own in cases} == {*product("012", repeat=2)}
    assert len(cases) < 3**4 / 5


def test_tests_without_the_mark_keep_all_their_cases(pytester: pytest.Pytester) -> None:
    assert len(taken_by_default(pytester, crossed("abc"), "a, b, c")) == 3**3


@pytest.mark.parametrize("mark", ["one_in(4)", "pairwise"])
def test_a_selection_changes_no_choice(mark: str, pytester: pytest.Pytester) -> None:
    """Of any selection, a default run takes the cases that it takes without the selection."""
    decorators = f"@pytest.mark.{mark}\n{crossed('abc')}"
    write(pytester, decorators, "a, b, c", "assert a + b + c != 2")
    usual = ("-m", "not full")
    kept = taken(pytester, *usual)
    assert taken(pytester, *usual, "-k", "2-1") == [own for own in kept if "2-1" in own] != []
    left_out = next(case for own in product("012", repeat=3) if (case := "-".join(own)) not in kept)
    assert taken(pytester, *usual, f"test_it.py::test_it[{kept[-1]}]") == kept[-1:]
    assert taken(pytester, *usual, f"test_it.py::test_it[{left_out}]") == []
    taken(pytester)  # all cases fail whose sum is 2, the full ones too
    failed = [own for own in kept if sum(map(int, own.split("-"))) == 2]
    assert taken(pytester, *usual, "--lf") == failed != []
