#!/usr/bin/env python3
"""Draw the pictures that docs/how-it-works.md explains: into images/, or another folder.

python tools/diagrams.py [FOLDER]

``one-microbatch`` is a simulated microbatch, with the name of every pass in its box, and with the
messages and collectives between the ranks. ``grid`` has the ranks of a job at their coordinates.
``cut-sequence`` is a microbatch cut along its sequence, as a sample and as passes.
"""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.parallel.grid import AxisName, Grid
from megatron.schedules.costs import Costs
from megatron.schedules.needs import CommKind
from megatron.schedules.request import Request
from megatron.simulator.draw.palette import GLYPH, MEANINGS
from megatron.simulator.draw.picture import Box, Label, Line, Picture
from megatron.simulator.draw.svg import paint_svg
from megatron.simulator.scenario import Scenario, run
from megatron.simulator.simulate import Span, Timeline

IMAGES: Final = Path(__file__).resolve().parents[1] / "images"

COMMS: Final[dict[CommKind, float]] = {
    "X": 0.2, "G": 0.2, "C0": 0.4, "C1": 0.4, "CIF": 0.4, "CIB": 0.4
}  # fmt: skip
ONE_MICROBATCH: Final = Scenario(
    Request("1f1b", "vocab-2", 4, 1, Costs({"F": 1.0, "B": 2.0, "IF": 0.3, "IB": 0.3}, COMMS)),
    output_layer=3.2,
)
"""The times are chosen so that every box has room for its name."""

COLLECTIVES: Final = {
    "CIF": "sums the looked-up embeddings for the first stage",
    "C0": "brings the last stage's output to all ranks",
    "C1": "the barrier: merges statistics, sums the input gradient for the last stage",
    "CIB": "brings the embeddings' gradient to all ranks",
}
SLICES: Final = 4
HOPS: Final = Costs({"F": 1.0, "B": 2.0}, {"X": 0.05, "G": 0.05})
WHOLE: Final = Scenario(Request("1f1b", "none", 3, 1, HOPS))
CUT: Final = Scenario(Request("1f1b", "none", 3, 1, HOPS, slices=SLICES))

GRID: Final = Grid(tensor_size=2, context_size=2, data_size=2, pipeline_size=4)
AXES: Final[dict[AxisName, str]] = {
    "tensor": "share every layer",
    "context": "share every sequence",
    "pipeline": "hand activations and gradients from stage to stage",
    "vocabulary": "share the vocabulary: the yellow row, one shard a rank",
    "data": "hold the same parameters, for other samples or other parts of them: gradients add up",
}
"""What the ranks of a group of each axis do together."""

_WIDTH: Final = 1240
_LEFT: Final = 70
_MARGIN: Final = 14
_ROW: Final = 20
_BASELINE: Final = 13.5
_TITLE: Final = 26
_BETWEEN: Final = 18  # room for messages between two rows
_CELL: Final = (64, 30)


class _Sheet:
    """Collects the shapes of one picture."""

    def __init__(self) -> None:
        self.boxes: list[Box] = []
        self.labels: list[Label] = []
        self.lines: list[Line] = []

    def picture(self, height: float) -> Picture:
        """Return the picture, which ends ``_MARGIN`` below ``height``."""
        return Picture(_WIDTH, round(height) + _MARGIN, self.boxes, self.labels, self.lines)

    def box(self, kind: str, x: float, y: float, width: float, height: float, *texts: str) -> None:
        """Draw a box with lines of text in its middle; a box without a kind is background."""
        self.boxes.append(Box("pass" if kind else "idle", kind, x, y, width, height))
        step = height / (len(texts) + 1)
        for number, text in enumerate(texts, 1):
            self.labels.append(Label("number", x + width / 2, y + step * number + 3.5, text))

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """Draw an arrow down or up, or to the right if both ends have one height."""
        self.lines.append(Line(x, y, to_x, to_y))
        back = -4 if to_y >= y else 4
        heads = ((-4, -3), (-4, 3)) if to_y == y else ((-3, back), (3, back))
        self.lines += [Line(to_x, to_y, to_x + dx, to_y + dy) for dx, dy in heads]

    def timeline(self, title: str, timeline: Timeline, y: float, scale: float) -> float:
        """Draw a row for each rank, with named passes; return the y below the last row.

        A message is an arrow from its sender to its receiver. A collective is a band over all
        ranks.
        """
        self.labels.append(Label("title", _MARGIN, y + 14, title))
        y += _TITLE + 12
        cut = any(span.slice for span in timeline.spans)
        tops = [y + rank * (_ROW + _BETWEEN) for rank in range(timeline.ranks)]
        below = tops[-1] + _ROW
        for rank, top in enumerate(tops):
            self.labels.append(Label("plain", _MARGIN, top + _BASELINE, f"rank {rank}"))
            self.box("", _LEFT, top, timeline.end * scale, _ROW)
        for band in (span for span in timeline.spans if span.rank == 0 and _is_collective(span)):
            x, width = _LEFT + band.start * scale, band.length * scale
            self.boxes.append(
                Box("comm", band.kind, x, y - 4, width, below - y + 8, COLLECTIVES[band.kind])
            )
            self.labels.append(Label("number", x + width / 2, y - 8, band.kind))
        for span in timeline.spans:
            if span.lane == "compute":
                x = _LEFT + span.start * scale
                self.box(
                    span.kind, x, tops[span.rank], span.length * scale, _ROW, _name(span, cut=cut)
                )
        for start, end, sender, receiver in _messages(timeline):
            edge = _ROW if receiver > sender else 0
            points = (tops[sender] + edge, tops[receiver] + _ROW - edge)
            self.arrow(_LEFT + start * scale, points[0], _LEFT + end * scale, points[1])
        return below + _MARGIN

    def legend(self, meanings: Mapping[str, str], y: float) -> float:
        """Explain kinds from left to right; return the y below."""
        x = float(_LEFT)
        for kind, meaning in meanings.items():
            text = f"{kind}: {meaning}"
            if x + 30 + len(text) * GLYPH > _WIDTH:
                x, y = float(_LEFT), y + _ROW
            self.box(kind, x, y, 10, 10)
            self.labels.append(Label("plain", x + 15, y + 9, text))
            x += 34 + len(text) * GLYPH
        return y + 10


def _is_collective(span: Span) -> bool:
    return span.lane == "comm" and span.kind.startswith("C")


def _name(span: Span, *, cut: bool) -> str:
    """Return the name of a pass of the only microbatch: its kind, and its slice if it is cut."""
    return f"{span.kind}/{span.slice}" if cut else span.kind


def _messages(timeline: Timeline) -> Iterator[tuple[float, float, int, int]]:
    """Yield start, end, sender and receiver of every message between two ranks."""
    for span in timeline.spans:
        if span.lane == "comm" and span.kind in "XG":
            sender = int(span.label.rsplit(" ", 1)[1])
            if span.rank != sender:
                yield span.start, span.end, sender, span.rank


def one_microbatch() -> Picture:
    """Return the timeline of one microbatch, with vocab-2."""
    sheet, timeline = _Sheet(), run(ONE_MICROBATCH).timeline
    scale = (_WIDTH - _LEFT - _MARGIN) / timeline.end
    title = "One microbatch on four ranks with vocab-2; time runs to the right"
    y = sheet.timeline(title, timeline, _MARGIN, scale)
    y = sheet.legend({kind: MEANINGS[kind] for kind in ("IF", "F", "S", "T", "B", "IB")}, y)
    y = sheet.legend(COLLECTIVES, y + 8)
    words = "arrows: X carries an activation to the next stage, G a gradient to the stage before"
    sheet.labels.append(Label("plain", _LEFT, y + 18, words))
    return sheet.picture(y + 20)


def grid() -> Picture:
    """Return the ranks of a job: replicas, in each of them stages, tensor and context ranks."""
    sheet = _Sheet()
    sizes = f"t = {GRID.tensor_size}, c = {GRID.context_size}, d = {GRID.data_size}"
    title = f"The {GRID.world_size} ranks of a job with {sizes}, p = {GRID.pipeline_size}"
    sheet.labels.append(Label("title", _MARGIN, _MARGIN + 14, title))
    (width, height), top = _CELL, _MARGIN + _TITLE + 50
    stage = GRID.tensor_size * width + 8
    replica = GRID.pipeline_size * stage + 30
    yellow = GRID.axis("vocabulary", 0).ranks
    for rank in range(GRID.world_size):
        at = GRID.coordinates(rank)
        x = _LEFT + at.data * replica + at.pipeline * stage + at.tensor * width
        y = top + at.context * (height + 8)
        shard = GRID.vocabulary_rank(at.pipeline, at.tensor)
        sheet.box(
            "S" if rank in yellow else "", x, y, width - 2, height, f"rank {rank}", f"shard {shard}"
        )
        if at.context == 0:
            sheet.labels.append(Label("number", x + width / 2, top - 6, f"tp = {at.tensor}"))
        if at.context == at.tensor == 0:
            middle = x + GRID.tensor_size * width / 2
            sheet.labels.append(Label("number", middle, top - 20, f"pp = {at.pipeline}"))
        if at.context == at.tensor == at.pipeline == 0:
            sheet.labels.append(Label("title", x, top - 36, f"replica dp = {at.data}"))
        if at.tensor == at.pipeline == at.data == 0:
            sheet.labels.append(Label("plain", _MARGIN, y + 19, f"cp = {at.context}"))
    y = top + GRID.context_size * (height + 8) + 18
    for name, task in AXES.items():
        ranks = ", ".join(map(str, GRID.axis(name, 0).ranks))
        sheet.labels.append(
            Label("plain", _MARGIN, y, f"axis {name} of rank 0: ranks {ranks} {task}")
        )
        y += 16
    return sheet.picture(y - 16)


def cut_sequence() -> Picture:
    """Return a sample cut into slices, and the passes of a whole and of a cut microbatch."""
    sheet, whole, cut = _Sheet(), run(WHOLE).timeline, run(CUT).timeline
    title = f"One microbatch, cut along its sequence into {SLICES} slices"
    sheet.labels.append(Label("title", _MARGIN, _MARGIN + 14, title))
    y, width = _MARGIN + _TITLE + 4.0, (_WIDTH - _LEFT - _MARGIN) / SLICES
    sheet.labels.append(Label("plain", _MARGIN, y + _BASELINE, "tokens"))
    for number in range(SLICES):
        x = _LEFT + number * width
        sheet.box("F", x, y, width - 30, _ROW, f"slice {number}")
        if number + 1 < SLICES:
            sheet.arrow(x + width - 28, y + 10, x + width - 4, y + 10)
    words = (
        "arrows: attention of a slice also reads the keys and values of the slices before it;"
        " their gradients come back in the opposite order"
    )
    sheet.labels.append(Label("plain", _LEFT, y + _ROW + 14, words))
    scale = (_WIDTH - _LEFT - _MARGIN) / whole.end
    y = sheet.timeline("The microbatch as a whole", whole, y + 60, scale)
    y = sheet.timeline(
        "In slices: a stage starts as soon as the first slice has arrived", cut, y + 10, scale
    )
    return sheet.picture(sheet.legend({kind: MEANINGS[kind] for kind in "FB"}, y))


PICTURES: Final = {
    "one-microbatch.svg": one_microbatch,
    "grid.svg": grid,
    "cut-sequence.svg": cut_sequence,
}


def main(folder: Path) -> None:
    """Draw all pictures into ``folder``."""
    for name, draw in PICTURES.items():
        (folder / name).write_text(paint_svg(draw()), encoding="utf-8")
        print(folder / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES)
