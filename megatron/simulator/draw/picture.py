"""Lay out a picture of timelines: one row per rank, time to the right, one scale for all panels.

Every rank has a row of passes; a box shows the microbatch's number if it has room for it. Below the
row are thin lanes for communications, as many as the rank has under way at once. A pair whose
segments are known is drawn in segments, with both numbers in its middle; the first lanes below show
when tokens of experts travel. A picture that is
too long for the width goes on in further strips. The result is boxes, texts and lines in pixels,
which ``svg`` paints.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import ceil, floor, log10
from typing import Final, Literal, NamedTuple

from megatron.schedules.needs import COMM_KINDS
from megatron.schedules.passes import CHUNKED_KINDS, PASS_KINDS
from megatron.simulator.draw.palette import GLYPH, MEANINGS, Role
from megatron.simulator.draw.stretches import (
    WHOLE,
    Stretch,
    Window,
    from_zero,
    shortest_pass,
    strips,
)
from megatron.simulator.simulate import Span, Timeline

WIDTH: Final = 1240
LEAST_WIDTH: Final = 900
_MARGIN: Final = 12
_LEFT: Final = 58  # where time 0 lies: room for "rank 15"
_RIGHT: Final = 20  # room for half of the axis' last number
_TITLE: Final = 24
_BOX: Final = 18
_BASELINE: Final = 12.5  # of a number in a box
_BAR: Final = 2.5  # height of the bar over a pair
_INSET: Final = 1.5  # from its ends to those of the pair
_LANE: Final = 4
_GAP: Final = 4
_AXIS: Final = 26
_TICK_ROOM: Final = 60
_LEGEND_LINE: Final = 18


class Panel(NamedTuple):
    """A timeline and its title."""

    title: str
    timeline: Timeline


class Box(NamedTuple):
    """A rectangle: its upper left corner and size in pixels.

    Attributes:
        look: ``pass`` has an edge; ``later`` (a rank's chunks after its first) has an edge and is
            paler; ``comm`` has no edge; ``idle`` is the background of a row; ``pair`` is a bar over
            the two passes of a pair.
        kind: the kind of pass or communication, which decides the colour; none for ``idle`` and
            ``pair``.
        note: text that appears when the reader points at the box.
    """

    look: Literal["pass", "later", "comm", "idle", "pair"]
    kind: str
    x: float
    y: float
    width: float
    height: float
    note: str = ""


class Label(NamedTuple):
    """A text at a point in pixels, where its baseline begins or is centred, by its role."""

    role: Role
    x: float
    y: float
    text: str


class Line(NamedTuple):
    """A line from one point in pixels to another; only axes have lines."""

    x: float
    y: float
    to_x: float
    to_y: float


class Picture(NamedTuple):
    """The shapes to paint, in pixels from the upper left corner; later boxes cover earlier ones."""

    width: int
    height: int
    boxes: list[Box]
    labels: list[Label]
    lines: list[Line]


def lay_out(
    panels: Sequence[Panel], width: int = WIDTH, unit: str = "", window: Window = WHOLE
) -> Picture:
    """Return a picture of ``panels`` below one another, on one time scale.

    Each panel's time counts from its first span. Spans that take no time are left out. The usual
    pass of a model chunk has room for the number of its microbatch; shorter passes are drawn
    without a number. Every box has its label and times as a note. If the picture would be wider
    than ``width``, it has several strips; each strip shows the same part of the time of all panels.

    Args:
        panels: at least one panel, each with a span that takes time.
        width: the most pixels that the picture may be wide.
        unit: unit of time, written at the axis.
        window: the part of the time to show.

    Raises:
        ValueError: if there is nothing to draw, or ``width`` is too small.
    """
    if not panels:
        raise ValueError("a picture needs at least one timeline")
    if width < 2 * _LEFT:
        raise ValueError(f"a picture of width {width} has no room: use at least {2 * _LEFT}")
    shown = [Panel(title, _with_content(title, timeline)) for title, timeline in panels]
    whole = window.stretch([timeline for _, timeline in shown])
    pixels = _pixels_per_unit([timeline for _, timeline in shown])
    parts = strips(whole, (width - _LEFT - _RIGHT) / pixels)
    used = min(width, max(LEAST_WIDTH, _LEFT + ceil(parts[0].length * pixels) + _RIGHT))
    sheet = _Sheet((used - _LEFT - _RIGHT) / parts[0].length)
    y = _MARGIN
    for part in parts:
        for panel in shown:
            if panel.timeline.end > part.begin:
                y = sheet.draw_panel(panel, part, y, unit)
    y = sheet.draw_legend(y, used)
    return Picture(used, y + _MARGIN, sheet.boxes, sheet.labels, sheet.lines)


def _with_content(title: str, timeline: Timeline) -> Timeline:
    started = from_zero(timeline)
    if not started.spans:
        raise ValueError(f"the timeline '{title}' has nothing to draw: nothing in it takes time")
    return started


def _pixels_per_unit(timelines: Sequence[Timeline]) -> float:
    """Return the pixels per unit of time that give a usual pass room for its number."""
    passes = [span for timeline in timelines for span in timeline.spans if span.lane == "compute"]
    digits = max((len(str(span.microbatch)) for span in passes), default=1)
    return _room(digits) / (shortest_pass(timelines) or max(t.end for t in timelines))


def _room(digits: int) -> float:
    """Return the least width of a box whose number does not touch the edges."""
    return digits * GLYPH + 4


class _Sheet:
    """Collects the boxes, texts and lines of panels and legend.

    Args:
        scale: pixels per unit of time.
    """

    def __init__(self, scale: float) -> None:
        self.boxes: list[Box] = []
        self.labels: list[Label] = []
        self.lines: list[Line] = []
        self._scale = scale

    def draw_panel(self, panel: Panel, part: Stretch, y: int, unit: str) -> int:
        """Draw ``part`` of a panel, whose top is ``y``; return the y below it."""
        timeline = panel.timeline
        part = Stretch(part.begin, min(part.end, timeline.end))
        self.labels.append(Label("title", _MARGIN, y + 14, panel.title))
        y += _TITLE
        beside: list[dict[str, list[Span]]] = [defaultdict(list) for _ in range(timeline.ranks)]
        for span in filter(part.shows, (*timeline.spans, *timeline.segments)):
            beside[span.rank][span.lane].append(span)
        for rank, lanes in enumerate(beside):
            self.labels.append(Label("plain", _MARGIN, y + _BASELINE, f"rank {rank}"))
            self.boxes.append(Box("idle", "", _LEFT, y, part.length * self._scale, _BOX))
            self._draw_row(timeline.compute(rank), lanes["work"], part, y)
            y += _BOX + 1
            for lane in (*_pack(lanes["tokens"]), *_pack(lanes["comm"])):
                self.boxes += [self._box("comm", span, part, y, _LANE) for span in lane]
                y += _LANE + 1
            y += _GAP
        self._draw_axis(part, y - _GAP + 1, unit)
        return y + _AXIS

    def draw_legend(self, y: int, width: int) -> int:
        """Draw the legend, with passes and communications apart; return the y below it."""
        kinds = {box.kind for box in self.boxes}
        paler, paired = (any(box.look == look for box in self.boxes) for look in ("later", "pair"))
        for group in (PASS_KINDS, COMM_KINDS):
            x = float(_LEFT)
            entries = {f"{kind} {MEANINGS[kind]}": str(kind) for kind in group if kind in kinds}
            if group is COMM_KINDS:
                tokens = (f"tokens-{kind}" for kind in CHUNKED_KINDS)
                entries |= {MEANINGS[kind]: kind for kind in tokens if kind in kinds}
            if group is PASS_KINDS and paler:
                entries["paler: later chunks of a rank"] = ""
            if group is PASS_KINDS and paired:
                entries["bar above: a pair, which runs together"] = ""
            for text, kind in entries.items():
                room = 26 + len(text) * GLYPH
                if x > _LEFT and x + room > width - _MARGIN:
                    x, y = float(_LEFT), y + _LEGEND_LINE
                if kind:
                    self.boxes.append(Box("pass", kind, x, y, 10, 10))
                self.labels.append(Label("plain", x + 14, y + 8.5, text))
                x += room
            if x > _LEFT:
                y += _LEGEND_LINE
        return y - _LEGEND_LINE + 10

    def _draw_row(self, row: Sequence[Span], work: Sequence[Span], part: Stretch, y: int) -> None:
        """Draw the passes of a rank; those of ``work`` in segments."""
        self.boxes += [self._pass_box(span, part, y) for span in work]
        known, by_label = {span.label for span in work}, {span.label: span for span in row}
        for span in filter(part.shows, row):
            box = self._pass_box(span, part, y)
            if span.label not in known:
                self.boxes.append(box)
                self._draw_number(str(span.microbatch), box)
            elif span.leads:
                other = by_label[span.beside]
                pair = self._pass_box(span._replace(end=other.end), part, y)
                self._draw_number(f"{span.microbatch}|{other.microbatch}", pair)
            if span.beside:
                self._draw_joint(span, box)

    def _draw_number(self, number: str, box: Box) -> None:
        if box.width >= _room(len(number)) * (1 - 1e-9):
            self.labels.append(Label("number", box.x + box.width / 2, box.y + _BASELINE, number))

    def _draw_joint(self, span: Span, box: Box) -> None:
        """Draw the half of a pair's bar that lies over ``box``; bars of two pairs do not touch."""
        inset = min(_INSET, box.width / 2)
        x = box.x + inset if span.leads else box.x
        self.boxes.append(Box("pair", "", x, box.y, box.width - inset, _BAR))

    def _pass_box(self, span: Span, part: Stretch, y: int) -> Box:
        return self._box("later" if span.chunk else "pass", span, part, y, _BOX)

    def _box(
        self, look: Literal["pass", "later", "comm"], span: Span, part: Stretch, y: int, height: int
    ) -> Box:
        """Return the box for the part of ``span`` inside ``part``; its note has the full times."""
        x, end = (self._x(time, part) for time in (span.start, span.end))
        name = f"{span.label} beside {span.beside}" if span.beside else span.label
        kind = span.kind
        if span.lane == "tokens":
            name, kind = f"tokens of {span.label}", f"tokens-{kind}"
        return Box(look, kind, x, y, end - x, height, f"{name}: {span.start:.4g} to {span.end:.4g}")

    def _x(self, time: float, part: Stretch) -> float:
        return _LEFT + (min(max(time, part.begin), part.end) - part.begin) * self._scale

    def _draw_axis(self, part: Stretch, y: int, unit: str) -> None:
        """Draw the axis of ``part``, with ticks at round numbers."""
        self.lines.append(Line(_LEFT, y, self._x(part.end, part), y))
        step = self._tick_step()
        first, last = ceil(part.begin / step - 1e-9), floor(part.end / step + 1e-9)
        for index in range(first, last + 1):
            x = self._x(index * step, part)
            text = f"{index * step:g}" + (f" {unit}" if unit and index == last else "")
            self.lines.append(Line(x, y, x, y + 3))
            self.labels.append(Label("tick", x, y + 13, text))

    def _tick_step(self) -> float:
        """Return the least of 1, 2 and 5 times a power of ten that leaves room for the numbers."""
        least = _TICK_ROOM / self._scale
        power = 10.0 ** floor(log10(least))
        return next(step for m in (1, 2, 5, 10) if (step := m * power) >= least * (1 - 1e-9))


def _pack(spans: Iterable[Span]) -> list[list[Span]]:
    """Spread ``spans`` over as few lanes as possible, without overlap in a lane."""
    lanes: list[list[Span]] = []
    for span in sorted(spans, key=lambda s: (s.start, s.end)):
        free = next((lane for lane in lanes if lane[-1].end <= span.start), None)
        if free is None:
            lanes.append([span])
        else:
            free.append(span)
    return lanes
