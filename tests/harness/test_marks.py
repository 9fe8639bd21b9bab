"""Which cases a default run leaves to the full one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
HOOK = """
import pytest
from harness.marks import leave_to_full
pytest_collection_modifyitems = pytest.hookimpl(tryfirst=True)(lambda items: leave_to_full(items))
"""


def collected(folder: Path, decorators: str, arguments: str) -> list[str]:
    """What a default run takes of one test with these decorators."""
    (folder / "conftest.py").write_text(HOOK)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n  full\n  one_in(n)\n")
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
