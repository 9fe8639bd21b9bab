"""The gallery: pictures of equal work, whose headlines and page say time and idle share."""

import re
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

import pytest

from megatron.commands.draw_schedule import Panels, draw, figures, pictures
from megatron.schedules.catalogue import SCHEDULES
from megatron.simulator.draw.picture import WIDTH
from megatron.simulator.draw.svg import paint_svg
from megatron.simulator.scenario import Simulation, run

ROOT: Final = Path(__file__).resolve().parents[2]
IMAGES: Final = ROOT / "images"
PICTURES: Final = pictures()
QUICK: Final = ("1f1b_vocab.svg", "treatments.svg", "gpipe.svg", "1f1b.svg")


def simulations(panels: Panels) -> dict[str, Simulation]:
    return {title: run(case) for title, case in panels.items()}


@pytest.mark.parametrize("name", QUICK)
def test_a_picture_in_the_repository_is_what_the_tool_draws(name: str) -> None:
    drawn = simulations(PICTURES[name])
    assert paint_svg(draw(drawn)) == (IMAGES / name).read_text(), "run python tools/draw.py"
    rows = [line for line in figures({name: drawn}).splitlines() if line.startswith("|")]
    assert "\n".join(rows[2:]) in (IMAGES / "README.md").read_text(), "run python tools/draw.py"


def test_every_schedule_that_is_not_searched_has_a_picture_and_none_is_left_over() -> None:
    own = {f"{name}.svg" for name, schedule in SCHEDULES.items() if not schedule.searched}
    assert set(PICTURES) == {"1f1b_vocab.svg", "treatments.svg", *own}
    assert {file.name for file in IMAGES.iterdir()} == {*PICTURES, "README.md"}


@pytest.mark.parametrize("name", QUICK[1:])
def test_all_panels_of_a_picture_do_the_same_work(name: str) -> None:
    works = [
        sum(map(done.timeline.work, range(done.timeline.ranks)))
        for done in simulations(PICTURES[name]).values()
    ]
    assert works == pytest.approx([works[0]] * len(works))


def test_more_barriers_hold_more_microbatches() -> None:
    held = [max(done.in_flight) for done in simulations(PICTURES["treatments.svg"]).values()]
    assert held == [8 + 3, 8 + 2, 8 + 1]


@pytest.mark.parametrize("picture", sorted(IMAGES.glob("*.svg")), ids=lambda path: path.stem)
def test_a_picture_fits_a_page_and_its_headlines_begin_with_time_and_idle(picture: Path) -> None:
    root = ElementTree.fromstring(picture.read_text())
    assert int(root.attrib["width"]) <= WIDTH
    titles = [e.text or "" for e in root.iter() if e.get("class") == "title"]
    assert len(titles) > 1
    for title in titles:
        assert re.search(r": time [0-9.]+, idle [0-9.]+%, [0-9.]+ microbatches in flight$", title)
