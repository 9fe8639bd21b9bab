"""Blocks of a page in Markdown, their figures, and the marks that name sources of figures.

``tools/figures.py`` says what a figure, a block and a mark are.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

NUMBER: Final = r"\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?"
UNITS: Final[Mapping[str, tuple[str, float]]] = {
    **dict.fromkeys(("s", "second", "seconds", "CPU s", "CPU seconds"), ("seconds", 1.0)),
    **{"ms": ("seconds", 1e-3), "us": ("seconds", 1e-6)},
    **dict.fromkeys(("minute", "minutes"), ("seconds", 60.0)),
    **dict.fromkeys(("hour", "hours"), ("seconds", 3600.0)),
    **{f"{own}B": ("bytes", 1e3**power) for power, own in enumerate("kMGT", 1)},
    **{f"{own}iB": ("bytes", 1024.0**power) for power, own in enumerate("KMGT", 1)},
    **{"GB/s": ("rate", 1e9), "TB/s": ("rate", 1e12), "Gb/s": ("rate", 1e9 / 8)},
    **dict.fromkeys(("point", "points"), ("points", 1.0)),
    **{unit: (unit, 1.0) for unit in ("%", "TFLOP/s", "GFLOP", "tokens/s", "times")},
    **dict.fromkeys(("layouts", "tests", "cases", "passed", "failed", "skipped"), ("count", 1.0)),
}
"""What a unit measures, and its size."""

_UNIT: Final = "|".join(re.escape(unit) for unit in sorted(UNITS, key=len, reverse=True))
_FIGURE: Final = re.compile(
    rf"(?<![\w.,/^-])(?P<more>(?:[-+]?{NUMBER}(?:%| %)?(?:, | to | and | or |, and ))*)"
    rf"[-+]?(?P<last>{NUMBER})[ -]?(?P<unit>{_UNIT})(?![\w/])"
)
_NUMBER: Final = re.compile(rf"(?P<last>{NUMBER})(?:[ -]?(?P<unit>{_UNIT})(?![\w/]))?")
_SMALL: Final = re.compile(r"(?<![\w.])\d(?:\.\d+)?e-\d+")
_DECIMAL: Final = re.compile(r"(?<![\w.,/])\d[\d,]*\.\d+(?![\w.]*\d)")
_HIDDEN: Final = re.compile(r"<!--.*?-->|`[^`]*`|\]\([^)]*\)|\$[^$]*\$", re.DOTALL)
_MARK: Final = re.compile(r"<!-- (from|run|figures)\b([^:]*): (.*?) -->", re.DOTALL)
_WRITTEN: Final = re.compile(r"<!-- (\w+\.py): (begin|end) -->")
_SCALES: Final = {
    "seconds": (1.0, 1e-3),
    "bytes": (1.0, 1e-3, 1 / 1024),
    "%": (1.0, 100.0),
    "rate": (1.0, 1e-3),
    "": (1.0, 1e-3),
}
"""Factors of numbers of a source that have no unit. Tables have units in their heads, and a report
has milliseconds where a page has seconds."""

_ROUNDED: Final = 2
"""Digits that a page may drop. A long number rounds to too many short ones to be their source."""


@dataclass(frozen=True)
class Number:
    """A number of a source.

    Attributes:
        value: as it is written.
        digits: significant digits that are written.
        unit: behind it; empty: none, or one that is not known.
    """

    value: float
    digits: int
    unit: str = ""


@dataclass(frozen=True)
class Figure:
    """A number of a page.

    Attributes:
        text: as the page has it.
        unit: behind it; empty: none.
    """

    text: str
    unit: str = ""

    def is_among(self, numbers: Sequence[Number]) -> bool:
        """Whether one of the numbers is this figure, exactly or with a few digits more."""
        plain = self.text.replace(",", "")
        mantissa, _, power = plain.partition("e")
        digits = len(mantissa.partition(".")[2])
        most = digits_of(self.text) + _ROUNDED
        room = 0.5 * 10.0 ** (int(power or 0) - digits) * (1 + 1e-6)
        return any(
            abs(float(plain) - one.value * scale) <= room
            for one in numbers
            if one.digits <= most
            for scale in self._scales(one.unit)
        )

    def _scales(self, unit: str) -> tuple[float, ...]:
        """Return the factors from a number with a unit of the source to this figure's unit."""
        kind, own = UNITS.get(self.unit, ("", 1.0))
        if not unit:
            return _SCALES.get(kind, (1.0,))
        its, size = UNITS[unit]
        return (size / own,) if its == kind else (1.0,) if not kind else ()


def digits_of(number: str) -> int:
    """Return the significant digits of a number as it is written."""
    return len(re.sub(r"e.*|[,.]", "", number).lstrip("0")) or 1


def numbers_in(text: str) -> tuple[Number, ...]:
    """Return all numbers of a text."""
    return tuple(
        Number(float(own["last"].replace(",", "")), digits_of(own["last"]), own["unit"] or "")
        for own in _NUMBER.finditer(text.replace("x,", " times,").replace("x |", " times |"))
    )


@dataclass
class Block:
    """A paragraph, list, table or code of a page.

    Attributes:
        line: number of its first line, from 1 on.
        text: its lines.
        tool: the tool that writes it; empty: none.
        marks: kind, detail and content of its marks.
    """

    line: int
    text: str
    tool: str = ""
    marks: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def is_code(self) -> bool:
        """Whether it is code."""
        return self.text.startswith(("    ", "```"))

    @property
    def is_command(self) -> bool:
        """Whether it is code that begins with a command of Python."""
        return self.is_code and self.text.lstrip("` \n").startswith("python ")

    @property
    def figures(self) -> list[Figure]:
        """Its figures, in their order."""
        if self.is_code:
            return []
        plain = _HIDDEN.sub(" ", self.text)
        found = list(_worded(plain)) + [Figure(own) for own in _SMALL.findall(plain)]
        if plain.startswith("|"):
            found += _of_table(plain, {own.text for own in found})
        return list(dict.fromkeys(found))


def _worded(text: str) -> Iterator[Figure]:
    """Yield numbers with a unit; all numbers of "1.2, 3 and 4.5 s" have it."""
    for found in _FIGURE.finditer(text):
        for number in [*re.findall(NUMBER, found["more"]), found["last"]]:
            yield Figure(number.rstrip(","), found["unit"])


def _of_table(text: str, known: set[str]) -> Iterator[Figure]:
    """Yield numbers with a decimal point of cells without words, but for the first column."""
    for row in text.splitlines()[2:]:
        for cell in row.split("|")[2:]:
            if not re.search(r"[A-Za-z]{2}", re.sub(_UNIT, "", cell)):
                yield from (Figure(own) for own in _DECIMAL.findall(cell) if own not in known)


def blocks(text: str) -> list[Block]:
    """Return the blocks of a page; marks that stand alone belong to the block before."""
    found: list[Block] = []
    tool, fence = "", False
    for line, lines in _runs(text):
        own = "\n".join(lines)
        fence = own.startswith("```")
        marks = _MARK.findall(own)
        edges = _WRITTEN.findall(own)
        writer = next((name for name, edge in edges if edge == "begin"), tool)
        tool = next(
            (name for name, edge in edges[::-1][:1] if edge == "begin"), "" if edges else tool
        )
        if found and not fence and not re.sub(r"<!--.*?-->", "", own, flags=re.DOTALL).strip():
            found[-1].marks += marks
        else:
            found.append(Block(line, own, writer, marks))
    return found


def _runs(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield runs of lines that are not empty, with the number of the first; a fence is one run."""
    run: list[str] = []
    for number, line in enumerate([*text.splitlines(), ""], 1):
        fenced = bool(run) and run[0].startswith("```") and not (len(run) > 1 and run[-1] == "```")
        if line.strip() or fenced:
            run.append(line)
        elif run:
            yield number - len(run), run
            run = []
