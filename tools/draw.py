#!/usr/bin/env python3
"""Draw the pictures of images/ anew, or a recorded run: the command draw-schedule, from a checkout.

python tools/draw.py                             # also writes their figures into docs/schedules.md
python tools/draw.py --timeline timeline.json    # what --record-timeline wrote, to timeline.svg
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.commands.draw_schedule import main

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "images"
SCHEDULES_PAGE = ROOT / "docs" / "schedules.md"


def with_figures(page: str, gallery: str) -> str:
    """Return the text of the page of the schedules with the figures of the gallery's page.

    On the page of the schedules, the fourth and the fifth cell of a schedule's row give time and
    idle share, each of one panel.

    Args:
        page: text of the page of the schedules.
        gallery: text of the gallery's page, with a row for every panel.
    """
    panel = r"[^|]* \| ([^|]*) \| ([^|]*) \| [^|]* \|\n"
    for name, *cells in re.findall(rf"\| \[(.*)\]\(.*\) \| {panel}\|  \| {panel}", gallery):
        figures = "{}, {} | {}, {}".format(*cells)
        row = rf"^(\| `{re.escape(name)}` \|[^|]*\|[^|]*\|)[^|]*\|[^|]*\|"
        page = re.sub(row, rf"\1 {figures} |", page, flags=re.MULTILINE)
    return page


if __name__ == "__main__":
    # The installed command must be told where to draw; a checkout has a folder for the pictures.
    main(sys.argv[1:] or ["--into", str(IMAGES)])
    if not sys.argv[1:]:
        gallery = (IMAGES / "README.md").read_text()
        SCHEDULES_PAGE.write_text(with_figures(SCHEDULES_PAGE.read_text(), gallery))
