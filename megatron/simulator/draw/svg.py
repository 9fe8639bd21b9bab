"""Paint a picture as an SVG document, which scales; a box shows its note when pointed at."""

from collections.abc import Iterator
from html import escape
from typing import Final

from megatron.simulator.draw.palette import (
    AXIS,
    BACKGROUND,
    COLOURS,
    EDGE,
    EDGE_OPACITY,
    EDGE_WIDTH,
    FONT_SIZE,
    FONTS,
    FRAME,
    IDLE,
    INK,
    LATER_CHUNK_OPACITY,
)
from megatron.simulator.draw.picture import Box, Line, Picture

_FAMILY: Final = "system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif"
_STYLE: Final = (
    f"text{{font:{FONT_SIZE}px {_FAMILY};fill:{INK}}}"
    f".pass{{stroke:{EDGE};stroke-opacity:{EDGE_OPACITY};stroke-width:{EDGE_WIDTH}}}"
    f".later{{fill-opacity:{LATER_CHUNK_OPACITY}}}.idle{{fill:{IDLE}}}.axis{{stroke:{AXIS}}}"
)
_CLASSES: Final = {
    "pass": "pass",
    "later": "pass later",
    "comm": "",
    "idle": "idle",
    "pair": "pair",
}


def paint_svg(picture: Picture) -> str:
    """Return ``picture`` as an SVG document.

    The document has its own background, so it can be read on light and dark pages.
    """
    width, height = picture.width, picture.height
    kinds = {box.kind for box in picture.boxes}
    colours = "".join(f".{kind}{{fill:{COLOURS[kind]}}}" for kind in COLOURS if kind in kinds)
    if any(box.look == "pair" for box in picture.boxes):
        colours += f".pair{{fill:{INK}}}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}">',
            f"<style>{_STYLE}{''.join(_fonts())}{colours}</style>",
            f'<rect x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="6" '
            f'fill="{BACKGROUND}" stroke="{FRAME}"/>',
            *map(_box, picture.boxes),
            *map(_line, picture.lines),
            *(
                f'<text class="{role}" x="{_short(x)}" y="{_short(y)}">{escape(text)}</text>'
                for role, x, y, text in picture.labels
            ),
            "</svg>\n",
        ]
    )


def _fonts() -> Iterator[str]:
    for role, font in FONTS.items():
        style = f"font-size:{font.size:g}px" + (";text-anchor:middle" if font.centred else "")
        yield f".{role}{{{style}{';font-weight:600' if font.bold else ''}}}"


def _box(box: Box) -> str:
    classes = " ".join(filter(None, (_CLASSES[box.look], box.kind)))
    head = (
        f'<rect class="{escape(classes)}" x="{_short(box.x)}" y="{_short(box.y)}" '
        f'width="{_short(box.width)}" height="{_short(box.height)}"'
    )
    return f"{head}><title>{escape(box.note)}</title></rect>" if box.note else f"{head}/>"


def _line(line: Line) -> str:
    start, end = (f"{_short(x)} {_short(y)}" for x, y in (line[:2], line[2:]))
    return f'<path class="axis" d="M{start}L{end}"/>'


def _short(number: float) -> str:
    """Return ``number`` with at most two decimals."""
    return f"{number:.2f}".rstrip("0").rstrip(".")
