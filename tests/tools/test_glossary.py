"""The glossary has every kind of pass and communication, and no word or letter twice."""

import re
from collections import Counter
from pathlib import Path
from typing import Final

import pytest

from megatron.parallel.grid import Coordinates
from megatron.schedules.needs import COMM_KINDS
from megatron.schedules.passes import PASS_KINDS
from megatron.schedules.treatments import TREATMENTS

DOCS: Final = Path(__file__).resolve().parents[2] / "docs"
GLOSSARY: Final = (DOCS / "glossary.md").read_text(encoding="utf-8")
HOW_IT_WORKS: Final = (DOCS / "how-it-works.md").read_text(encoding="utf-8")


def words_of(text: str) -> list[str]:
    """Return the words that the first cells of all rows explain; heads of tables are no words."""
    cells = re.findall(r"^\| ([^|]+) \| [^|]+ \|$(?!\n\|---)", text, re.MULTILINE)
    return [word for cell in cells for word in re.sub(r" \[[^]]*\]", "", cell).split(", ")]


WORDS: Final = words_of(GLOSSARY)


def test_no_word_has_two_meanings() -> None:
    assert [word for word, times in Counter(WORDS).items() if times > 1] == []


@pytest.mark.parametrize("kind", [*PASS_KINDS, *COMM_KINDS])
def test_every_kind_of_pass_and_communication_is_explained(kind: str) -> None:
    assert kind in WORDS


def test_the_output_matrix_and_the_layers_input_are_no_passes_and_no_messages() -> None:
    """Their letters are apart from those of a plan, and the formulas use no letter of a plan."""
    letters = set(words_of(GLOSSARY[GLOSSARY.index("## Letters") :]))
    assert {"M", "H", "Y", "A"} <= letters
    assert letters.isdisjoint({*PASS_KINDS, *COMM_KINDS})
    formulas = HOW_IT_WORKS[HOW_IT_WORKS.index("## S and T") :].split("\n## ")[0]
    lines = re.findall(r"^    (.+)$", formulas, re.MULTILINE)
    assert lines
    used = set(re.findall(r"\b[A-Z]\b", re.sub(r"[_ᵀ]", " ", " ".join(lines))))
    assert used <= letters


def test_the_words_of_the_code_are_explained() -> None:
    """The treatments, and the coordinates of a rank."""
    assert all(f"`{name}`" in GLOSSARY for name in TREATMENTS)
    assert all(name in GLOSSARY for name in vars(Coordinates(0, 0, 0)))


def test_how_it_works_gives_a_letter_no_other_meaning() -> None:
    """W is the weight gradient's pass and never a matrix, m counts and is never a maximum."""
    assert not re.search(r"\bW_[jk]|Wᵀ|Eᵀ|\bm'|\[E o|\bX Wᵀ", HOW_IT_WORKS)
