"""Timelines as files. Simulated and recorded timelines have the same format."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, get_type_hints

from megatron.native.files import read_text, replace_text, write_text
from megatron.native.slow_work import told
from megatron.schedules.needs import COMM_KINDS
from megatron.schedules.passes import PASS_KINDS
from megatron.simulator.simulate import Span, Timeline

_TYPES: Final = get_type_hints(Span)
_KINDS: Final = {"compute": PASS_KINDS, "comm": COMM_KINDS, "wait": COMM_KINDS}
"""The kinds of spans in each lane."""

_LARGEST: Final = {"rank": 1 << 20, "microbatch": 10**9, "chunk": 1 << 20, "slice": 1 << 20}
"""Bounds of numbers; larger ones are damage, and would let a reader count for hours."""

_LONGEST_LABEL: Final = 40
"""Characters. A terminal obeys some that nobody sees, and a picture may not hold them."""

_LAST_TIME: Final = 1e21
"""The latest time: simulated timelines count FLOPs, of which an iteration has fewer."""

_ROUNDING: Final = 1e-6
"""Share of the whole time by which passes may overlap: GPUs tell times as numbers of 32 bits."""


def save_timeline(timeline: Timeline, path: Path, *, is_own_name: bool = False) -> None:
    """Write ``timeline`` as JSON: the number of ranks and a list of spans with named fields.

    Waits stand among the spans, in the lane ``wait``. If writing fails, the file stays as it was
    before.

    Args:
        timeline: the timeline.
        path: the file.
        is_own_name: whether the program chose the name, so that a link of this name is replaced.

    Raises:
        OSError: if the file cannot be written; the message names the file.
    """
    in_order = sorted((*timeline.spans, *timeline.waits), key=lambda s: (s.start, s.rank))
    spans = [_fields(span) for span in in_order]
    path.parent.mkdir(parents=True, exist_ok=True)
    write = replace_text if is_own_name else write_text
    write(path, json.dumps({"ranks": timeline.ranks, "spans": spans}, indent=0) + "\n")


def load_timeline(path: Path) -> Timeline:
    """Read a file that ``save_timeline`` wrote.

    Raises:
        OSError: if the file does not exist or cannot be read.
        ValueError: if the file holds no timeline.
    """
    try:
        document = json.loads(read_text(path))
        ranks, named = document["ranks"], document["spans"]
        spans = [_span(one) for one in told(named, len(named), f"spans of {path}")]
        found = {span.rank for span in spans}
        if ranks != len(found) or found != set(range(len(found))):
            raise ValueError(f"ranks is {str(ranks)[:40]}, and there are spans of {len(found)}")
        timeline = Timeline.of_lanes(ranks, spans)
        _check_rows(timeline)
        return timeline
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} holds no timeline: give a file that --record-timeline wrote ({error})"
        ) from error


def _fields(span: Span) -> dict[str, object]:
    """Return the fields of a span; ``beside`` and ``slice`` only if they say something."""
    named = span._asdict()
    for name in ("beside", "slice"):
        if not named[name]:
            del named[name]
    return named


def _span(named: Any) -> Span:
    """Return a span whose values are of the right types.

    Raises:
        TypeError: if the fields are not those of a span.
        ValueError: if a value has a wrong type or is out of range.
    """
    span = Span(**named)
    for name, kind in _TYPES.items():
        value = getattr(span, name)
        right = isinstance(value, (int, float)) if kind is float else isinstance(value, kind)
        if not right or isinstance(value, bool):
            raise ValueError(f"{name} is {str(value)[:40]!r}, which is no {kind.__name__}")
    if not -_LAST_TIME <= span.start <= span.end <= _LAST_TIME:
        raise ValueError(f"{_shown(span.label)} lasts from {span.start} to {span.end}")
    for label in (span.label, span.beside):
        if not label.isprintable() or len(label) > _LONGEST_LABEL:
            raise ValueError(f"label is {_shown(label)}: it must be a short word, such as F0")
    if span.lane not in _KINDS:
        raise ValueError(f"lane is {_shown(span.lane)}: the lanes are {', '.join(_KINDS)}")
    if span.kind not in _KINDS[span.lane]:
        kinds = " ".join(_KINDS[span.lane])
        raise ValueError(f"kind is {_shown(span.kind)}: the lane {span.lane} has {kinds}")
    for name, largest in _LARGEST.items():
        if not 0 <= getattr(span, name) < largest:
            number = str(getattr(span, name))[:40]
            raise ValueError(f"{name} is {number}: it must be from 0 to {largest - 1}")
    return span


def _shown(text: str) -> str:
    """Return a word of a file in the form for a message: quoted and cut to 40 characters."""
    return repr(text[:40])


def _check_rows(timeline: Timeline) -> None:
    """Check that no rank runs two passes at the same time.

    Raises:
        ValueError: if a rank does.
    """
    allowed = _ROUNDING * max((abs(span.end) for span in timeline.spans), default=0.0)
    for rank in range(timeline.ranks):
        for before, after in pairwise(timeline.compute(rank)):
            if before.end > after.start + allowed:
                raise ValueError(
                    f"on rank {rank} {_shown(before.label)} and {_shown(after.label)} overlap: the "
                    f"first ends at {before.end}, the second begins at {after.start}"
                )
