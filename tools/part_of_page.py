"""A part of a page that a tool writes, between two marks, and the flags of such a tool."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from megatron.flags.declare import flag

PAGE: Final = Path(__file__).resolve().parents[1] / "docs" / "choosing-a-schedule.md"


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


def replaced(page: str, text: str, tool: str) -> str:
    """Return a page with the part of a tool replaced; the name of its file stands in the marks."""
    begin, end = f"<!-- {tool}: begin -->", f"<!-- {tool}: end -->"
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n{text}\n{end}{after}"


def each_replaced(page: str, texts: Sequence[str], tool: str) -> str:
    """Return a page with all parts of a tool replaced, in their order.

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


def put(text: str, write: Callable[[str, str], str], *, update: bool, page: Path = PAGE) -> None:
    """Print a part, or put it into ``page`` by ``write``, which gets the page and the part."""
    if update:
        page.write_text(write(page.read_text(encoding="utf-8"), text), encoding="utf-8")
    else:
        print(text)
