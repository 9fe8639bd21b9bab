"""Which files of tests a run took its time for, so that growth is seen."""

from collections import Counter, defaultdict

import pytest


class SlowestFiles:
    """Prints the files whose cases took the most seconds, with all fixtures that they made.

    With several workers the seconds of all are added up.

    Args:
        most: number of files.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._seconds = defaultdict[str, float](float)
        self._cases = Counter[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the time of a part of a case: its setup, its call or its teardown."""
        file = report.nodeid.partition("::")[0]
        self._seconds[file] += report.duration
        self._cases[file] += report.when == "setup"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the files."""
        terminalreporter.section(f"slowest {self._most} files")
        slowest = sorted(self._seconds.items(), key=lambda own: -own[1])
        for file, seconds in slowest[: self._most]:
            terminalreporter.write_line(f"{seconds:8.1f} s {self._cases[file]:6,} cases  {file}")
        total, cases = sum(self._seconds.values()), sum(self._cases.values())
        terminalreporter.write_line(f"{total:8.1f} s {cases:6,} cases  all files")
