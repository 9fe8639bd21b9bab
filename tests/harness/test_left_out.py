"""The list of test functions that neither a default run nor CI runs."""

from harness.left_out import Case, faults, left_out, reasons_of

QUICK = Case("tests/a/test_a.py::test_quick[1]", full=False)
QUICK_TOO = Case("tests/a/test_a.py::test_quick[2]", full=True)
LONG = Case("tests/a/test_a.py::test_long[p1-x]", full=True)
LONGER = Case("tests/a/test_a.py::test_longer", full=True)
CASES = (QUICK, QUICK_TOO, LONG, LONGER)
ALL = ["tests/a/test_a.py::test_long", "tests/a/test_a.py::test_longer"]


def test_a_function_with_a_quick_case_runs_by_default() -> None:
    assert left_out(CASES, []) == ALL


def test_a_selection_is_a_folder_a_file_a_function_or_a_case() -> None:
    for selection in ("tests", "tests/a", "tests/a/test_a.py"):
        assert left_out(CASES, [selection]) == []
    for selection in ("tests/a/test_a.py::test_long", LONG.nodeid):
        assert left_out(CASES, [selection]) == ALL[1:]
    for other in ("tests/a/test_a", "tests/a/test_a.py::test_lo", "tests/b"):
        assert left_out(CASES, [other]) == ALL


def test_every_function_that_is_left_out_has_a_reason() -> None:
    assert len(list(faults(CASES, [], {}))) == 2
    assert not list(faults(CASES, [], dict.fromkeys(ALL, "takes hours")))
    [fault] = faults(CASES, [], {ALL[0]: "takes hours", ALL[1]: ""})
    assert ALL[1] in fault


def test_a_reason_for_a_test_that_runs_or_is_gone_is_a_fault() -> None:
    reasons = {**dict.fromkeys(ALL, "hours"), QUICK.function: "quick", "tests/b.py::test_b": "gone"}
    assert [fault.split()[0] for fault in faults(CASES, [], reasons)] == list(reasons)[2:]


def test_a_selection_without_a_full_case_is_a_fault() -> None:
    for selection in (QUICK.nodeid, "tests/b"):
        [fault] = faults(CASES, [selection], dict.fromkeys(ALL, "hours"))
        assert fault.startswith(selection)


def test_reasons_are_read_line_by_line() -> None:
    line = "tests/a/test_a.py::test_long: 10 minutes: a page"
    assert reasons_of([line]) == {"tests/a/test_a.py::test_long": "10 minutes: a page"}
