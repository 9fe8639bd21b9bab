"""Draw a timeline as text: a row per rank, a column per unit of time, strips below one another.

The exchange of a rank with its replicas has its own row below the row of passes.
"""

from collections.abc import Iterator, Sequence
from textwrap import fill
from typing import Final, NamedTuple

from megatron.schedules.needs import REPLICA_KINDS
from megatron.schedules.passes import CHUNKED_KINDS, PASS_KINDS
from megatron.simulator.draw.palette import MEANINGS
from megatron.simulator.draw.stretches import (
    WHOLE,
    Stretch,
    Window,
    from_zero,
    shortest_pass,
    strips,
)
from megatron.simulator.simulate import Span, Timeline

_IDLE: Final = "."
_NAMELESS: Final = "+"
_END: Final = "|"
_JOINT: Final = "&"
"""The end of a pass, and the end of the first pass of a pair."""


class _Piece(NamedTuple):
    """The part of a span in a strip: from column ``first`` to before column ``last``."""

    span: Span
    first: int
    last: int

    @property
    def room(self) -> int:
        """Number of columns."""
        return self.last - self.first

    @property
    def last_sign(self) -> str:
        """The sign in the last column: it marks the end of a pass, or of the first of a pair."""
        return _JOINT if self.span.leads else _END

    @property
    def text(self) -> str:
        """The label if it fits, else the kind if that fits, else a sign."""
        span = self.span
        label = span.label if span.lane == "compute" else f"{span.kind}{span.microbatch}"
        names = (label, span.kind)
        return next((name for name in names if len(name) <= self.room), _NAMELESS)


def draw_text(
    timeline: Timeline,
    width: int = 120,
    unit: str = "",
    window: Window = WHOLE,
    most: int | None = None,
) -> str:
    """Return a drawing at most ``width`` characters wide, with its legend below.

    The usual pass of a model chunk has room for its label with microbatch and chunk. A drawing that
    does not fit into the width goes on in further strips. A pass too short for its label has only
    its kind; a label is never cut.

    Args:
        timeline: the timeline to draw.
        width: the most characters of a line.
        unit: unit of time, written at the times.
        window: the part of the time to show.
        most: strips to draw at most; by default all.

    Raises:
        ValueError: if nothing runs in the window.
    """
    timeline = from_zero(timeline)
    whole = window.stretch([timeline])
    columns = max(1, width - len(_name(timeline, 0)))
    parts = strips(whole, columns / _columns_per_unit(timeline))
    lines: list[str] = []
    pieces: list[_Piece] = []
    for part in parts[:most]:
        own = [_piece(span, part, columns) for span in timeline.spans if _is_shown(span, part)]
        times = f"{part.begin:.4g} to {part.end:.4g} of {timeline.end:.4g}"
        lines += [f"time {times} {unit}".rstrip(), *_rows(timeline, own, columns)]
        pieces += own
    legend = "; ".join(_legend(pieces, f"{parts[0].length / columns:.3g} {unit}".rstrip()))
    return "\n".join([*lines, fill(legend, width)])


def _columns_per_unit(timeline: Timeline) -> float:
    """Return the columns per unit of time that give a usual pass room for the longest label."""
    labels = [span.label for span in timeline.spans if span.kind in CHUNKED_KINDS]
    return (max(map(len, labels), default=1) + 1) / (shortest_pass([timeline]) or timeline.end)


def _name(timeline: Timeline, rank: int) -> str:
    return f"rank {rank}".ljust(len(f"rank {timeline.ranks - 1} "))


def _is_shown(span: Span, part: Stretch) -> bool:
    return (span.lane == "compute" or span.is_exchange) and part.shows(span)


def _piece(span: Span, part: Stretch, columns: int) -> _Piece:
    scale = columns / part.length
    first, last = (round((time - part.begin) * scale) for time in (span.start, span.end))
    return _Piece(span, max(0, first), min(columns, last))


def _rows(timeline: Timeline, pieces: Sequence[_Piece], columns: int) -> Iterator[str]:
    for rank in range(timeline.ranks):
        own = [piece for piece in pieces if piece.span.rank == rank]
        exchanged = [piece for piece in own if piece.span.is_exchange]
        name = _name(timeline, rank)
        yield name + _row([piece for piece in own if not piece.span.is_exchange], columns)
        if exchanged:
            yield " " * len(name) + _row(exchanged, columns)


def _row(pieces: Sequence[_Piece], columns: int) -> str:
    cells = [_IDLE] * columns
    for piece in pieces:
        text, room = piece.text, piece.room
        ended = text.ljust(room - 1, "-") + piece.last_sign if room > len(text) else text
        cells[piece.first : piece.last] = ended[:room]
    return "".join(cells)


def _legend(pieces: Sequence[_Piece], column: str) -> Iterator[str]:
    """Yield the parts of the legend of a drawing; ``column`` is the time of one column."""
    kinds = {piece.span.kind for piece in pieces}
    shown = (*PASS_KINDS, *REPLICA_KINDS)
    yield ", ".join(f"{kind} {MEANINGS[kind]}" for kind in shown if kind in kinds)
    spans = [piece.span for piece in pieces if piece.span.kind not in (*REPLICA_KINDS, "U")]
    if spans:
        example = max(spans, key=lambda s: (s.chunk, s.kind in CHUNKED_KINDS, s.microbatch))
        chunk = f" in chunk {example.chunk} of its rank" if example.chunk else ""
        yield f"{example.label} is {example.kind} of microbatch {example.microbatch}{chunk}"
    if any(piece.span.beside for piece in pieces):
        yield f"{_JOINT} joins the two passes of a pair, which run together"
    of_buckets = [kind for kind in ("U", *REPLICA_KINDS) if kind in kinds]
    if of_buckets:
        yield f"after {', '.join(of_buckets)} stands the number of a bucket"
    if any(piece.text == piece.span.kind for piece in pieces if piece.room):
        yield "a kind alone has no room for its microbatch"
    if any(piece.text == _NAMELESS for piece in pieces if piece.room):
        yield f"{_NAMELESS} has no room for its kind"
    if not all(piece.room for piece in pieces):
        yield "passes shorter than a column may be left out"
    yield f"{_IDLE} is idle; a column is {column}"
