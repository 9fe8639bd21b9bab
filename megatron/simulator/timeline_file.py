"""Timelines as files. Simulated and recorded timelines have the same format."""

import json
from math import isfinite
from pathlib import Path
from typing import Any, get_type_hints

from megatron.native.files import read_text, write_text
from megatron.simulator.simulate import Span, Timeline

_TYPES = get_type_hints(Span)


def save_timeline(timeline: Timeline, path: Path) -> None:
    """Write ``timeline`` as JSON: the number of ranks and a list of spans with named fields.

    Waits stand among the spans, in the lane ``wait``. The file is complete or as it was before.

    Raises:
        OSError: it cannot be written; the message names it.
    """
    in_order = sorted((*timeline.spans, *timeline.waits), key=lambda s: (s.start, s.rank))
    spans = [span._asdict() for span in in_order]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps({"ranks": timeline.ranks, "spans": spans}, indent=0) + "\n")


def load_timeline(path: Path) -> Timeline:
    """Read what ``save_timeline`` wrote.

    Raises:
        OSError: there is no such file, or it cannot be read.
        ValueError: the file holds no timeline.
    """
    try:
        document = json.loads(read_text(path))
        ranks, spans = document["ranks"], [_span(named) for named in document["spans"]]
        found = {span.rank for span in spans}
        if ranks != len(found) or found != set(range(len(found))):
            raise ValueError(f"ranks is {str(ranks)[:40]}, and there are spans of {len(found)}")
        return Timeline.of_lanes(ranks, spans)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} holds no timeline: give a file that --record-timeline wrote ({error})"
        ) from error


def _span(named: Any) -> Span:
    """Return a span whose values are of the right types.

    Raises:
        TypeError: it has other fields.
        ValueError: a value has another type, or is no time.
    """
    span = Span(**named)
    for name, kind in _TYPES.items():
        value = getattr(span, name)
        right = isinstance(value, (int, float)) if kind is float else isinstance(value, kind)
        if not right or isinstance(value, bool):
            raise ValueError(f"{name} is {str(value)[:40]!r}, which is no {kind.__name__}")
    if not (isfinite(span.start) and isfinite(span.end)):
        raise ValueError(f"a span lasts from {span.start} to {span.end}")
    return span
