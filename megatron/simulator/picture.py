"""Draw timelines as an SVG picture: one row per rank, time to the right, one scale for all panels.

Every rank has a row of passes, with the microbatch's number in each box that has room for it, and
below it as many thin lanes as it ever has communications under way at once.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from html import escape
from math import floor, log10
from typing import Final, NamedTuple

from megatron.schedules.needs import COMM_KINDS
from megatron.schedules.passes import PASS_KINDS
from megatron.simulator.simulate import Span, Timeline

COLOURS: Final[Mapping[str, str]] = {
    "F": "#6ea8e8",
    "B": "#f2a65a",
    "W": "#7cc47f",
    "S": "#f7e08a",
    "T": "#e3bb2e",
    "IF": "#c3a5e6",
    "IB": "#9a6fd0",
    "X": "#2f6db5",
    "G": "#c06a14",
    "C0": "#8d8d8d",
    "C1": "#d1495b",
    "C2": "#7d1d2e",
    "CIF": "#8f79c9",
    "CIB": "#5b3a99",
}
"""Fill of every kind of pass and communication; the paler shades carry the numbers."""

MEANINGS: Final[Mapping[str, str]] = {
    "F": "forward",
    "B": "backward",
    "W": "weight gradient",
    "S": "output layer before its barrier",
    "T": "after it",
    "IF": "input layer forward",
    "IB": "backward",
    "X": "activation",
    "G": "gradient",
    "C0": "broadcast for S",
    "C1": "barrier 1",
    "C2": "barrier 2",
    "CIF": "embedding",
    "CIB": "its gradient",
}
"""What the legend says of every kind."""

_MARGIN: Final = 12
_LEFT: Final = 58  # where time 0 lies: room for "rank 15"
_RIGHT: Final = 20  # room for half of the axis' last number
_TITLE: Final = 24
_BOX: Final = 18
_BASELINE: Final = 12.5  # of a number in a box
_LANE: Final = 4
_GAP: Final = 4
_AXIS: Final = 26
_TICK_ROOM: Final = 60
_LEGEND_LINE: Final = 18
_FONT: Final = 9.5
_GLYPH: Final = 0.58 * _FONT  # a digit, or the mean letter with some room to spare
_LATER_CHUNK_OPACITY: Final = 0.5  # of a rank's chunks after its first

_STYLE: Final = (
    f"text{{font:{_FONT}px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;"
    "fill:#1f2328}.number,.tick{text-anchor:middle}.title{font-size:13px;font-weight:600}"
    ".pass{stroke:#1f2328;stroke-opacity:.45;stroke-width:.5}"
    f".later{{fill-opacity:{_LATER_CHUNK_OPACITY}}}"
    ".idle{fill:#f3f4f6}.axis{stroke:#8c959f}"
)


class Panel(NamedTuple):
    """A timeline and what stands above it."""

    title: str
    timeline: Timeline


def draw_svg(panels: Sequence[Panel], width: int = 900, unit: str = "") -> str:
    """Return an SVG document with ``panels`` below one another, on one time scale.

    The picture has a background of its own, so that it can be read on light and dark pages. Each
    panel's time is counted from its first span. Passes too short for their number have none; every
    box has its label and times as a tooltip.

    Args:
        panels: at least one, each with at least one span.
        width: width of the document in pixels; the height follows.
        unit: unit of time, written at the axis.

    Raises:
        ValueError: if there is nothing to draw, or no room to draw it.
    """
    if not panels:
        raise ValueError("a picture needs at least one timeline")
    for panel in panels:
        if not panel.timeline.spans:
            raise ValueError(f"the timeline '{panel.title}' has no spans to draw")
    if width < 2 * _LEFT:
        raise ValueError(f"a picture of width {width} has no room: use at least {2 * _LEFT}")
    started = [Panel(title, _from_zero(timeline)) for title, timeline in panels]
    duration = max(timeline.end for _, timeline in started)
    scale = _Scale((width - _LEFT - _RIGHT) / duration if duration else 0.0)
    body: list[str] = []
    y = _MARGIN
    for panel in started:
        lines, y = _draw_panel(panel, y, scale, unit)
        body += lines
    kinds = {span.kind for panel in panels for span in panel.timeline.spans}
    legend, y = _draw_legend(kinds, y, width)
    height = y + _MARGIN
    colours = "".join(f".{kind}{{fill:{COLOURS[kind]}}}" for kind in COLOURS if kind in kinds)
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}">',
        f"<style>{_STYLE}{colours}</style>",
        f'<rect x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="6" '
        'fill="#ffffff" stroke="#d0d7de"/>',
    ]
    return "\n".join([*head, *body, *legend, "</svg>"]) + "\n"


class _Scale(NamedTuple):
    """How time becomes pixels."""

    pixels_per_unit: float

    def x(self, time: float) -> str:
        """Return where ``time`` lies."""
        return _short(_LEFT + time * self.pixels_per_unit)

    def rect(self, kind: str, start: float, end: float, y: int, height: int) -> str:
        """Return the opening of a box of class ``kind`` over a span of time."""
        length = _short((end - start) * self.pixels_per_unit)
        return (
            f'<rect class="{kind}" x="{self.x(start)}" y="{y}" width="{length}" height="{height}"'
        )


def _from_zero(timeline: Timeline) -> Timeline:
    origin = min(span.start for span in timeline.spans)
    spans = (s._replace(start=s.start - origin, end=s.end - origin) for s in timeline.spans)
    return Timeline(timeline.ranks, tuple(spans))


def _draw_panel(panel: Panel, y: int, scale: _Scale, unit: str) -> tuple[list[str], int]:
    """Return a panel whose top is ``y``, and the y below it."""
    timeline = panel.timeline
    lines = [f'<text class="title" x="{_MARGIN}" y="{y + 14}">{escape(panel.title)}</text>']
    y += _TITLE
    for rank in range(timeline.ranks):
        lines.append(f'<text x="{_MARGIN}" y="{y + _BASELINE}">rank {rank}</text>')
        lines.append(scale.rect("idle", 0.0, timeline.end, y, _BOX) + "/>")
        for span in timeline.compute(rank):
            lines += _draw_pass(span, y, scale)
        y += _BOX + 1
        comms = [s for s in timeline.spans if s.rank == rank and s.lane == "comm"]
        for lane in _pack(comms):
            lines += [
                scale.rect(s.kind, s.start, s.end, y, _LANE) + f">{_tooltip(s)}</rect>"
                for s in lane
            ]
            y += _LANE + 1
        y += _GAP
    lines += _draw_axis(timeline.end, y - _GAP + 1, scale, unit)
    return lines, y + _AXIS


def _draw_pass(span: Span, y: int, scale: _Scale) -> Iterator[str]:
    kind = f"pass {span.kind}" + (" later" if span.chunk else "")
    yield scale.rect(kind, span.start, span.end, y, _BOX) + f">{_tooltip(span)}</rect>"
    number = str(span.microbatch)
    if (span.end - span.start) * scale.pixels_per_unit > len(number) * _GLYPH + 1:
        middle = scale.x((span.start + span.end) / 2)
        yield f'<text class="number" x="{middle}" y="{y + _BASELINE}">{number}</text>'


def _tooltip(span: Span) -> str:
    return f"<title>{escape(span.label)}: {span.start:.4g} to {span.end:.4g}</title>"


def _pack(spans: Sequence[Span]) -> list[list[Span]]:
    """Spread ``spans`` over as few lanes as keep them from overlapping."""
    lanes: list[list[Span]] = []
    for span in sorted(spans, key=lambda s: (s.start, s.end)):
        free = next((lane for lane in lanes if lane[-1].end <= span.start), None)
        if free is None:
            lanes.append([span])
        else:
            free.append(span)
    return lanes


def _draw_axis(duration: float, y: int, scale: _Scale, unit: str) -> Iterator[str]:
    """Yield the axis from 0 to ``duration``, with ticks at round numbers."""
    yield f'<path class="axis" d="M{_LEFT} {y}H{scale.x(duration)}"/>'
    step = _tick_step(duration, scale)
    last = floor(duration / step + 1e-9) if step else 0
    for index in range(last + 1):
        x = scale.x(index * step)
        text = f"{index * step:g}" + (f" {unit}" if unit and index == last else "")
        yield f'<path class="axis" d="M{x} {y}v3"/>'
        yield f'<text class="tick" x="{x}" y="{y + 13}">{escape(text)}</text>'


def _tick_step(duration: float, scale: _Scale) -> float:
    """Return the least of 1, 2 and 5 times a power of ten that leaves room for the numbers."""
    if not duration:
        return 0.0
    least = _TICK_ROOM / scale.pixels_per_unit
    power = 10.0 ** floor(log10(least))
    return next(step for m in (1, 2, 5, 10) if (step := m * power) >= least * (1 - 1e-9))


def _draw_legend(kinds: Set[str], y: int, width: int) -> tuple[list[str], int]:
    """Return the legend of ``kinds``, passes and communications apart, and the y below it."""
    lines: list[str] = []
    for group in (PASS_KINDS, COMM_KINDS):
        x = float(_LEFT)
        for kind in (k for k in group if k in kinds):
            text = f"{kind} {MEANINGS[kind]}"
            room = 26 + len(text) * _GLYPH
            if x > _LEFT and x + room > width - _MARGIN:
                x, y = float(_LEFT), y + _LEGEND_LINE
            lines.append(
                f'<rect class="pass {kind}" x="{_short(x)}" y="{y}" width="10" height="10"/>'
            )
            lines.append(f'<text x="{_short(x + 14)}" y="{y + 8.5}">{text}</text>')
            x += room
        if x > _LEFT:
            y += _LEGEND_LINE
    return lines, y - _LEGEND_LINE + 10


def _short(number: float) -> str:
    """Return ``number`` with at most two decimals."""
    return f"{number:.2f}".rstrip("0").rstrip(".")
