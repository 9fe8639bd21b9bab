"""Which cases a default run leaves to the full one."""

import os
import subprocess
import sys
from itertools import combinations, product
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
HOOK = """
import pytest
from harness.marks import keep_pairs, leave_to_full

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    keep_pairs(items)
    leave_to_full(items)
"""


def collected(folder: Path, decorators: str, arguments: str) -> list[str]:
    """What a default run takes of one test with these decorators."""
    (folder / "conftest.py").write_text(HOOK)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n  full\n  one_in(n)\n  pairwise\n")
    (folder / "test_it.py").write_text(
        f"import pytest\n{decorators}\ndef test_it({arguments}):\n    pass\n"
    )
    listed = subprocess.check_output(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "not full", "test_it.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        text=True,
    )
    return [line.split("[")[1].rstrip("]") for line in listed.splitlines() if "[" in line]


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
def test_one_in_three(decorators: str, arguments: str, kept: list[str], tmp_path: Path) -> None:
    found = collected(tmp_path, f"@pytest.mark.one_in(3)\n{decorators}", arguments)
    assert sorted(found) == sorted(kept)


def test_every_pair_of_values_is_kept_and_few_cases(tmp_path: Path) -> None:
    crossed = (f'@pytest.mark.parametrize("{name}", range(3))' for name in "abcd")
    found = collected(tmp_path, "\n".join(["@pytest.mark.pairwise", *crossed]), "a, b, c, d")
    cases = [tuple(own.split("-")) for own in found]
    for one, other in combinations(range(4), 2):
        assert {(own[one], own[other]) for own in cases} == {*product("012", repeat=2)}
    assert len(cases) < 3**4 / 5


def test_tests_without_the_mark_keep_all_their_cases(tmp_path: Path) -> None:
    crossed = (f'@pytest.mark.parametrize("{name}", range(3))' for name in "abc")
    assert len(collected(tmp_path, "\n".join(crossed), "a, b, c")) == 3**3
