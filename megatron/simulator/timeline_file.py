"""Timelines as files. Simulated and recorded timelines have the same format."""

import json
from pathlib import Path

from megatron.simulator.simulate import Span, Timeline


def save_timeline(timeline: Timeline, path: Path) -> None:
    """Write ``timeline`` as JSON: the number of ranks and a list of spans with named fields.

    Waits stand among the spans, in the lane ``wait``.
    """
    in_order = sorted((*timeline.spans, *timeline.waits), key=lambda s: (s.start, s.rank))
    spans = [span._asdict() for span in in_order]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"ranks": timeline.ranks, "spans": spans}, indent=0) + "\n")


def load_timeline(path: Path) -> Timeline:
    """Read what ``save_timeline`` wrote.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file holds no timeline.
    """
    try:
        document = json.loads(path.read_text())
        return Timeline.of_lanes(int(document["ranks"]), [Span(**s) for s in document["spans"]])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} holds no timeline: give a file that --record-timeline wrote ({error})"
        ) from error
