"""The README stays short, and its links, its commands and its block are those of the repository."""

import re
from pathlib import Path
from typing import Final

from megatron.schedules.blocks.block import Block, Slot
from megatron.schedules.blocks.one_f_one_b import one_f_one_b
from tools.figures import anchor

ROOT: Final = Path(__file__).resolve().parents[2]
PAGES: Final = (ROOT / "README.md", ROOT / "examples/README.md")
README: Final = PAGES[0].read_text(encoding="utf-8")


def test_it_is_read_in_ten_minutes() -> None:
    assert len(README.splitlines()) <= 150


def test_every_link_leads_somewhere() -> None:
    """MkDocs checks the links of docs/, but does not read these two pages from where they lie."""
    for page in PAGES:
        links = re.findall(r"\]\((?!http)([^)#]+)(?:#([^)]+))?\)", page.read_text("utf-8"))
        assert links
        for file, section in links:
            target = page.parent / file
            assert target.exists(), file
            if section:
                headings = re.findall(r"^#+ (.+)$", target.read_text("utf-8"), re.MULTILINE)
                assert section in map(anchor, headings), f"{file}#{section}"


def test_its_commands_are_there() -> None:
    named = re.findall(r"(?:python|bash) ([\w/]+\.(?:py|sh))", README)
    assert {"tools/plan.py", "pretrain_gpt.sh", "tests/run.sh"} <= {*named}
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_its_block_is_1f1b() -> None:
    """The two lines of the README, run for several numbers of ranks."""
    rows, block = re.findall(r"^    (?:rows = |return (?=Block))(.+?) +# .*$", README, re.MULTILINE)
    for p in (1, 2, 5):
        made = eval(rows, {"Slot": Slot, "p": p})
        found = eval(block, {"Block": Block, "rows": made, "p": p})
        assert found == one_f_one_b(p)
