"""The page of the schedules has the figures of the pictures."""

import re

from megatron.schedules.catalogue import SCHEDULES
from tools.draw import IMAGES, SCHEDULES_PAGE, with_figures

GALLERY = (IMAGES / "README.md").read_text()


def test_the_page_is_what_the_tool_writes() -> None:
    page = SCHEDULES_PAGE.read_text()
    assert with_figures(page, GALLERY) == page, "run python tools/draw.py"


def test_old_figures_are_replaced_and_nothing_else() -> None:
    page = SCHEDULES_PAGE.read_text()
    of_a_picture = r"(?=.*\]\(\.\./images/)"
    figures = rf"\| [0-9.]+, [0-9.]+% \| [0-9.]+, [0-9.]+% \|{of_a_picture}"
    old, count = re.subn(figures, "| 1, 2% | 3, 4% |", page)
    assert count == sum(not schedule.searched for schedule in SCHEDULES.values())
    assert with_figures(old, GALLERY) == page


def test_a_row_by_hand() -> None:
    gallery = """| picture | panel | time | idle | in flight |
|---|---|--:|--:|--:|
| [a](a.svg) | A, on the ends | 10.5 | 50.0% | 4 |
|  | A, over all ranks | 7 | 2.5% | 5 |
"""
    page = "| `a` | a schedule | p | old | | [a](../images/a.svg) |\n| `b` | another | | | | |\n"
    assert with_figures(page, gallery) == (
        "| `a` | a schedule | p | 10.5, 50.0% | 7, 2.5% | [a](../images/a.svg) |\n"
        "| `b` | another | | | | |\n"
    )
