"""A run can tell how long it took for each file."""

import re
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
FILE = """import time, pytest

@pytest.fixture
def slow():
    time.sleep({fixture})

@pytest.mark.parametrize("case", range({cases}))
def test_it(case, slow):
    time.sleep({call})
"""


def test_files_are_in_the_order_of_their_seconds(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "from harness.slowest_files import SlowestFiles\n"
        "def pytest_configure(config):\n    config.pluginmanager.register(SlowestFiles(2))\n"
    )
    for name, values in {
        "test_fixtures.py": {"fixture": 0.2, "call": 0.0, "cases": 3},
        "test_calls.py": {"fixture": 0.0, "call": 0.1, "cases": 2},
        "test_quick.py": {"fixture": 0.0, "call": 0.0, "cases": 1},
    }.items():
        (tmp_path / name).write_text(FILE.format(**values))
    said = subprocess.check_output(
        [sys.executable, "-m", "pytest", "-q"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(TESTS)},
        text=True,
    )
    rows = re.findall(r"^ +([\d.]+) s +(\d+) cases  (.+)$", said, re.MULTILINE)
    assert [(int(cases), file) for _, cases, file in rows] == [
        (3, "test_fixtures.py"),
        (2, "test_calls.py"),
        (6, "all files"),
    ]
    first, second, whole = (float(seconds) for seconds, *_ in rows)
    assert first >= 0.6
    assert second >= 0.2
    assert whole >= first + second
