#!/usr/bin/env python3
"""Say which figures of the pages name their source, page by page.

python -m tools.figures [--pages PAGE ...] [--lacking]

A *figure* is a number that somebody measured or predicted: with a unit (s, ms, GiB, %, TFLOP/s
...), a ratio (1.59 times), the size of an error (2e-6), a count of layouts, tests or cases, or a
number with a decimal point in a cell of a table that has no words. Numbers in code, flags, links,
dates and formulas are none. A *block* is a paragraph, a list or a table: the lines up to the next
empty line. A block with figures has a *mark*, a comment that the page does not show, at its end, or
behind an empty line after it:

    <!-- from: benchmarks/2026-11-26-two-cores/report.md LOG.md#2026-11-26-evening -->
    <!-- run: python tools/simulate.py -p 4 -m 8 -->
    <!-- run 2.61, 44.0: above -->
    <!-- figures 455, 624: arithmetic over the report's times, 137 GFLOP -->
    <!-- figures: sizes of buffers in NCCL's documentation -->

Files of *from* are sought beside the page, and in the repository. They, or their sections whose
anchors begin so, must have every figure of the block, with as many digits or up to two more.
*run* names the command that makes the figures; *above* and *below* are the next one on the page.
Figures that stand before its colon are printed by this very command: a test runs it, and compares.
*figures* gives the reason why these figures, or all of the block, have no such source. What a tool
writes between its own marks counts as run.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.flags.command import read
from megatron.flags.declare import flag
from tools.pages.blocks import NUMBER, Block, Figure, Number, blocks, numbers_in

ROOT: Final = Path(__file__).resolve().parents[1]

_LARGE: Final = 30_000
"""Bytes of a file of which a section must be named."""


@cache
def numbers_of(path: Path, section: str = "") -> tuple[Number, ...]:
    """Return all numbers of a file, or of its sections whose anchors begin with ``section``.

    Raises:
        ValueError: if no section of a large file is named.
    """
    text = path.read_text(encoding="utf-8")
    if not section and len(text) > _LARGE:
        raise ValueError(f"{path.name} is long: name its section, {path.name}#SECTION")
    if section:
        parts = re.split(r"^#+ (?=.*$)", text, flags=re.MULTILINE)
        text = "\n".join(part for part in parts if anchor(part.split("\n")[0]).startswith(section))
    return numbers_in(text)


def anchor(heading: str) -> str:
    """Return the anchor of a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-")


def source(page: Path, name: str) -> tuple[Path, str]:
    """Return the file and the section of a name in a mark.

    Raises:
        ValueError: if there is no such file.
    """
    file, _, section = name.partition("#")
    for folder in (page.parent, ROOT):
        if (folder / file).is_file():
            return folder / file, section
    raise ValueError(f"no file {file}")


def sources_of(page: Path, block: Block) -> tuple[list[Number], list[str]]:
    """Return the numbers of the files that a block names, and the faults of these names."""
    numbers: list[Number] = []
    wrong = []
    for name in (name for kind, _, said in block.marks if kind == "from" for name in said.split()):
        try:
            own = numbers_of(*source(page, name))
        except ValueError as error:
            wrong.append(str(error))
        else:
            numbers += own
            wrong += [] if own else [f"{name} has no number"]
    return numbers, wrong


def words_of(detail: str) -> set[str]:
    """Return the figures that stand before the colon of a mark."""
    return set(re.findall(NUMBER, detail))


def reasons_of(block: Block) -> tuple[set[str], bool, list[str]]:
    """Return the figures that have a reason, whether all have one, and the faults of reasons."""
    named: set[str] = set()
    known = {own.text for own in block.figures}
    all_have, wrong = bool(block.tool), []
    for kind, detail, said in block.marks:
        all_have = all_have or kind == "run" or (kind == "figures" and not detail.strip())
        wrong += [f"{own} of the mark is no figure here" for own in words_of(detail) - known]
        if kind == "figures":
            named |= words_of(detail)
            wrong += [] if len(said.split()) >= 3 else [f"'{said}' is no reason"]
    return named, all_have, wrong


def faults_of(page: Path, block: Block) -> list[str]:
    """Return what a block lacks: a source of its figures, or something of its marks."""
    numbers, of_sources = sources_of(page, block)
    named, all_have, of_reasons = reasons_of(block)
    found = [*of_sources, *of_reasons]
    left = [own for own in block.figures if own.text not in named and not own.is_among(numbers)]
    if left and not all_have:
        words = ", ".join(f"{own.text} {own.unit}".strip() for own in left)
        found.append(f"no source has {words}" if numbers else f"no source: {words}")
    return found


def faults(page: Path) -> list[str]:
    """Return the faults of a page, each with its line."""
    found = blocks(page.read_text(encoding="utf-8"))
    return [f"{page.name}:{own.line}: {fault}" for own in found for fault in faults_of(page, own)]


def commands(page: Path) -> Iterator[tuple[str, frozenset[Figure]]]:
    """Yield the commands that marks of a page name, with the figures that they print."""
    found = blocks(page.read_text(encoding="utf-8"))
    for index, block in enumerate(found):
        for kind, detail, content in block.marks:
            if kind != "run":
                continue
            printed = words_of(detail)
            beside = found[index:] if content == "below" else found[index::-1]
            if content in ("above", "below"):
                code = next((own.text for own in beside if own.is_command), "")
                content = "\n".join(line.strip() for line in code.splitlines())
            told = re.sub(r"\s*\\\n\s*", " ", content).split("\n")[0]
            yield told, frozenset(own for own in block.figures if own.text in printed)


@dataclass(frozen=True)
class FiguresFlags:
    """Pages."""

    pages: tuple[Path, ...] = flag(
        (), "Only these pages.", unset="README.md and docs/*.md", metavar="PAGE ..."
    )
    lacking: bool = flag(False, "Also print each figure that lacks a source.")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    flags = read(argv, __doc__, FiguresFlags)[FiguresFlags]
    print(
        "| page | figures | from files | run | by a reason | lacking |\n|---|--:|--:|--:|--:|--:|"
    )
    for page in flags.pages or (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        counts = dict.fromkeys(("from", "run", "figures", ""), 0)
        for block in blocks(page.read_text(encoding="utf-8")):
            kinds = [kind for kind, _, _ in block.marks]
            kind = "run" if block.tool else next((k for k in counts if k in kinds), "")
            counts[kind] += len(block.figures)
        print(f"| {page.name} | {sum(counts.values())} |", *(f"{n} |" for n in counts.values()))
        if flags.lacking:
            print(*faults(page), sep="\n")


if __name__ == "__main__":
    main()
