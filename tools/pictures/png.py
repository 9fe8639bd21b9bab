"""Paint a picture as PNG, in the look of the SVG; needs matplotlib."""

from pathlib import Path
from typing import TYPE_CHECKING, Final

from megatron.simulator.draw.palette import (
    AXIS,
    BACKGROUND,
    COLOURS,
    EDGE,
    EDGE_OPACITY,
    EDGE_WIDTH,
    FONTS,
    IDLE,
    INK,
    LATER_CHUNK_OPACITY,
)
from megatron.simulator.draw.picture import Box, Picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHARPNESS: Final = 2.0
"""Dots per pixel of the layout, where the picture is not too large for that."""

_MOST_DOTS: Final = 2**16 - 1  # that Agg can paint in one direction
_PIXELS_PER_INCH: Final = 72  # a pixel is then a point, the unit of fonts and lines
_FONT_SCALE: Final = 0.88  # matplotlib's own font is that much wider than those of a browser


def paint_png(picture: Picture, path: Path) -> None:
    """Write ``picture`` as PNG.

    Raises:
        ValueError: if matplotlib is not installed, or the picture is too large for it.
        OSError: if the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            f"{path}: PNG needs matplotlib: pip install matplotlib (or -e '.[tools]'), or draw to "
            "a file that ends in .svg"
        ) from error
    width, height = picture.width, picture.height
    if max(width, height) > _MOST_DOTS:
        raise ValueError(
            f"{path}: a PNG of {width} x {height} is too large: draw to a file that ends in .svg"
        )
    figure = Figure((width / _PIXELS_PER_INCH, height / _PIXELS_PER_INCH), facecolor=BACKGROUND)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    _paint_boxes(axes, picture)
    _paint_lines_and_labels(axes, picture)
    sharpness = min(SHARPNESS, _MOST_DOTS / max(width, height))
    figure.savefig(path, dpi=_PIXELS_PER_INCH * sharpness, format="png")


def _paint_boxes(axes: "Axes", picture: Picture) -> None:
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import to_rgba

    def fill(box: Box) -> tuple[float, float, float, float]:
        if box.look == "idle":
            return to_rgba(IDLE)
        return to_rgba(COLOURS[box.kind], LATER_CHUNK_OPACITY if box.look == "later" else 1.0)

    axes.add_collection(
        PolyCollection(
            [
                [(x, y), (x + width, y), (x + width, y + height), (x, y + height)]
                for _, _, x, y, width, height, _ in picture.boxes
            ],
            facecolors=[fill(box) for box in picture.boxes],
            edgecolors=[
                to_rgba(EDGE, EDGE_OPACITY if box.look in ("pass", "later") else 0.0)
                for box in picture.boxes
            ],
            linewidths=EDGE_WIDTH,
        ),
        autolim=False,
    )


def _paint_lines_and_labels(axes: "Axes", picture: Picture) -> None:
    from matplotlib.collections import LineCollection

    lines = [[(line.x, line.y), (line.to_x, line.to_y)] for line in picture.lines]
    axes.add_collection(LineCollection(lines, colors=AXIS, linewidths=1.0), autolim=False)
    for role, x, y, text in picture.labels:
        font = FONTS[role]
        axes.text(
            x,
            y,
            text,
            fontsize=font.size * _FONT_SCALE,
            fontweight="bold" if font.bold else "normal",
            horizontalalignment="center" if font.centred else "left",
            color=INK,
            parse_math=False,
        )
