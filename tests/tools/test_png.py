"""PNG pictures: the size of the layout, the colours of the SVG, and an error without matplotlib."""

import sys
from pathlib import Path

import pytest

from megatron.simulator.draw.palette import COLOURS
from megatron.simulator.draw.picture import Box, Panel, Picture, lay_out
from megatron.simulator.simulate import Span, Timeline
from tools.pictures.png import SHARPNESS, paint_png

TIMELINE = Timeline(
    1, (Span(0, "compute", "F0", "F", 0, 0, 0, 1), Span(0, "comm", "X", "X", 0, 0, 1, 2))
)


def test_a_box_has_the_colour_of_its_kind_where_the_layout_puts_it(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    picture = lay_out([Panel("a price of $5 or $6", TIMELINE)])
    paint_png(picture, tmp_path / "a.png")
    dots = imread(tmp_path / "a.png")
    assert dots.shape[:2] == (picture.height * SHARPNESS, picture.width * SHARPNESS)
    for kind in ("F", "X"):
        box = next(box for box in picture.boxes if box.kind == kind)
        at_y, at_x = box.y + box.height / 2, box.x + box.width / 4
        red, green, blue = (
            round(255 * c) for c in dots[int(at_y * SHARPNESS), int(at_x * SHARPNESS)][:3]
        )
        assert f"#{red:02x}{green:02x}{blue:02x}" == COLOURS[kind]


def test_a_picture_that_is_too_large_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    huge = Picture(70000, 100, [Box("pass", "F", 0, 0, 1, 1)], [], [])
    with pytest.raises(ValueError, match=r"70000 x 100 is too large: .*\.svg"):
        paint_png(huge, tmp_path / "a.png")


def test_without_matplotlib_the_way_out_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"a\.png: PNG needs matplotlib: pip install .*\.svg"):
        paint_png(lay_out([Panel("a", TIMELINE)]), tmp_path / "a.png")
