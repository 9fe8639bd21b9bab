"""tools/pages/tables.py: rows, rules and errors as they stand in the pages."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.pages.tables import Errors, escaped, percent, row, rule, table, tell


def test_a_table_has_a_rule_for_each_side() -> None:
    assert list(table(("a", "b"), [(1, "x"), ("", 2.5)])) == [
        "| a | b |",
        "|---|--:|",
        "| 1 | x |",
        "|  | 2.5 |",
    ]
    assert rule(5, "llr") == "|---|---|--:|--:|--:|"
    assert rule(2, "rlr") == "|--:|---|"
    assert escaped("a|b", 1) == r"| a\|b | 1 |"


def test_errors_in_words() -> None:
    """By hand: sizes 10, 20 and 30 % with signs + - -."""
    found = Errors([0.1, -0.2, -0.3])
    assert (found.mean, found.largest) == ("20.0 %", "30.0 %")
    assert (found.worst, found.signed) == ("-30.0 %", "-13.3 %")
    assert (percent(0.5), percent(0.5, "+")) == ("50.0 %", "+50.0 %")


def test_rows_are_printed_as_they_are_made_and_the_page_is_written_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, seen = tmp_path / "page.md", list[str]()
    page.write_text("x\n\n| a | b |\n|:-:|---|\n| old | 0 |\n\n| c |\n|---|\n")
    before = page.read_text()

    def first() -> Iterator[str]:
        for number in range(2):
            seen.append(capsys.readouterr().out)
            assert page.read_text() == before
            yield row("new", number)

    tell({row("a", "b"): first(), row("c"): (row(len(seen)) for _ in "x")}, page)
    assert seen == ["| a | b |\n|---|--:|\n", "| new | 0 |\n"]
    assert capsys.readouterr().out == "| new | 1 |\n\n| c |\n|---|\n| 2 |\n"
    assert page.read_text() == (
        "x\n\n| a | b |\n|:-:|---|\n| new | 0 |\n| new | 1 |\n\n| c |\n|---|\n| 2 |\n"
    )
