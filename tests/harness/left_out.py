"""Test functions that run neither by default nor in CI."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

CI: Final = Path(__file__).resolve().parents[2] / ".ci"


class Case(NamedTuple):
    """A collected case of a test.

    Attributes:
        nodeid: pytest's name, ``file::function[parameters]``.
        full: whether a default run leaves it out.
    """

    nodeid: str
    full: bool

    @property
    def function(self) -> str:
        """``file::function``; of a test in a class, the class too."""
        file, _, rest = self.nodeid.partition("::")
        return f"{file}::{rest.partition('[')[0]}"

    def is_in(self, selection: str) -> bool:
        """Return whether pytest takes the case, given the name of a folder, a file or a test."""
        rest = self.nodeid.removeprefix(selection)
        return rest == "" or (rest != self.nodeid and rest[0] in "/:[")


def lines_of(file: Path) -> list[str]:
    """Return the lines of a list without its empty lines and comments."""
    lines = file.read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def reasons_of(lines: Sequence[str]) -> dict[str, str]:
    """Return the reason of every function in lines of the form ``file::function: reason``."""
    pairs = (line.partition(": ") for line in lines)
    return {function: reason for function, _, reason in pairs}


def left_out(cases: Sequence[Case], in_ci: Sequence[str]) -> list[str]:
    """Return the functions of which neither a default run nor CI runs a case.

    Args:
        cases: all cases of all tests.
        in_ci: the selections of ``full`` cases that CI runs.
    """
    run = {
        case.function
        for case in cases
        if not case.full or any(case.is_in(selection) for selection in in_ci)
    }
    return list(dict.fromkeys(case.function for case in cases if case.function not in run))


def faults(
    cases: Sequence[Case], in_ci: Sequence[str], reasons: Mapping[str, str]
) -> Iterator[str]:
    """Yield what is wrong with the lists of CI.

    Args:
        cases: all cases of all tests.
        in_ci: the selections of ``full`` cases that CI runs.
        reasons: the functions that are known to run in neither, each with the reason.
    """
    left = left_out(cases, in_ci)
    for function in left:
        if not reasons.get(function):
            yield (
                f"{function} runs neither by default nor in CI: name a case in .ci/full_cases, or "
                "the reason in .ci/left_out"
            )
    for function in reasons:
        if function not in left:
            yield f"{function} runs, or is no test: take it out of .ci/left_out"
    for selection in in_ci:
        if not any(case.full and case.is_in(selection) for case in cases):
            yield f"{selection} selects no case that is marked full: take it out of .ci/full_cases"


def report(cases: Iterable[Case]) -> tuple[str, int]:
    """Return the functions that are left out with their reasons or the faults, and an exit code."""
    cases, in_ci = list(cases), lines_of(CI / "full_cases")
    reasons = reasons_of(lines_of(CI / "left_out"))
    if found := list(faults(cases, in_ci, reasons)):
        return "\n".join(found), 1
    listed = "\n".join(f"  {function}: {reason}" for function, reason in reasons.items())
    functions = len({case.function for case in cases})
    head = f"{len(reasons)} of {functions} test functions run only with --full:"
    return f"{head}\n{listed}", 0
