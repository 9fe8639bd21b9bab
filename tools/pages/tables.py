"""Tables in Markdown, and the pages that have them: one renderer for all tools.

A page has a table either below the line with the names of its columns (``tell``), or between two
marks with the name of the tool that writes it (``put``).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from typing import Final

from megatron.flags.declare import flag

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "choosing-a-schedule.md"


def row(*cells: object) -> str:
    """Return a row of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def escaped(*cells: object) -> str:
    """Return a row of a table whose cells may have the sign between cells."""
    return row(*(str(cell).replace("|", "\\|") for cell in cells))


def rule(columns: int, sides: str = "lr") -> str:
    """Return the line below the names of the columns.

    Args:
        columns: number of columns.
        sides: side to which each column is aligned, ``l`` or ``r``; the last holds for the rest.
    """
    every = chain(sides, repeat(sides[-1]))
    return f"|{'|'.join('---' if next(every) == 'l' else '--:' for _ in range(columns))}|"


def table(
    names: Sequence[object], rows: Iterable[Sequence[object]], sides: str = "lr"
) -> Iterator[str]:
    """Yield the lines of a table.

    Args:
        names: of its columns.
        rows: cells of each row.
        sides: as in ``rule``.
    """
    yield row(*names)
    yield rule(len(names), sides)
    for cells in rows:
        yield row(*cells)


def percent(share: float, sign: str = "") -> str:
    """Return a share in percent; with ``sign`` ``+`` it has its sign."""
    return f"{share:{sign}.1%}".replace("%", " %")


@dataclass(frozen=True)
class Errors:
    """Relative errors of several predictions, in words.

    Attributes:
        values: predicted over measured, minus 1.
    """

    values: Sequence[float]

    @property
    def mean(self) -> str:
        """The mean size."""
        return percent(sum(map(abs, self.values)) / len(self.values))

    @property
    def largest(self) -> str:
        """The largest size."""
        return percent(max(map(abs, self.values)))

    @property
    def worst(self) -> str:
        """The error of the largest size, with its sign."""
        return percent(max(self.values, key=abs), "+")

    @property
    def signed(self) -> str:
        """The mean, with its sign."""
        return percent(sum(self.values) / len(self.values), "+")


def tell(tables: Mapping[str, Iterable[str]], page: Path | None = None, sides: str = "lr") -> None:
    """Print tables row by row as they are made, and then put them into a page.

    Args:
        tables: rows by the line with the names of the columns.
        page: has each table below its names already; ``None``: no page is written.
        sides: as in ``rule``, of what is printed: a page keeps its own.

    Raises:
        ValueError: as in ``update``.
    """
    made: dict[str, list[str]] = {}
    for heading, rows in tables.items():
        print(*[""] * bool(made), heading, rule(heading.count("|") - 1, sides), sep="\n")
        own = made[heading] = []
        for line in rows:
            own.append(line)
            print(line, flush=True)
    if page is not None:
        for heading, lines in made.items():
            update(page, heading, lines)


def update(page: Path, heading: str, lines: Sequence[str]) -> None:
    """Replace the rows of the table below ``heading`` in ``page``.

    Raises:
        ValueError: if the page cannot be read, or has no table under the heading.
    """
    try:
        rows = page.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {page}: {error}") from error
    if rows.count(heading) != 1:
        raise ValueError(f"{page} has {rows.count(heading)} tables with '{heading}', not one")
    start = rows.index(heading) + 2
    end = start
    while end < len(rows) and rows[end].startswith("|"):
        end += 1
    page.write_text("\n".join([*rows[:start], *lines, *rows[end:]]) + "\n", encoding="utf-8")


def update_flag(
    excludes: str = "", about: str = "Also replace the tables of this page, which must be whole."
) -> Path | None:
    """Declare ``--update PAGE``."""
    return flag(None, about, unset="none", metavar="PAGE", excludes=excludes)


@dataclass(frozen=True)
class PartFlags:
    """Tables."""

    update: bool = flag(False, "Write the tables into the page.")
    keep: Path | None = flag(
        None,
        "Folder in which rows are kept as they are made. Started again with the same code, the "
        "tool goes on after the last of them.",
        unset="no row is kept",
        metavar="FOLDER",
    )


def replaced(page: str, texts: Sequence[str], tool: str) -> str:
    """Return a page with all parts of a tool replaced, in their order.

    Args:
        page: text of the page.
        texts: of the parts.
        tool: name of the tool's file, as it stands in the marks.

    Raises:
        ValueError: the page has more or fewer parts of this tool than ``texts``.
    """
    begin, end = f"<!-- {tool}: begin -->", f"<!-- {tool}: end -->"
    head, *rest = page.split(begin)
    if len(rest) != len(texts):
        raise ValueError(f"the page has {len(rest)} parts {begin}, and {tool} writes {len(texts)}")
    behind = (old.partition(end)[2] for old in rest)
    pairs = zip(texts, behind, strict=True)
    return head + "".join(f"{begin}\n{text}\n{end}{after}" for text, after in pairs)


def put(texts: Sequence[str], tool: str, *, update: bool, page: Path = PAGE) -> None:
    """Print the parts of a tool, or write them into ``page``; see ``replaced``."""
    if update:
        text = page.read_text(encoding="utf-8")
        page.write_text(replaced(text, texts, tool), encoding="utf-8")
    else:
        print("\n\n".join(texts))
