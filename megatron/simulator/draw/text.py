"""Draw a timeline as text: one row per rank, one column per unit of time."""

from megatron.simulator.simulate import Timeline


def draw_text(timeline: Timeline, width: int = 120, until: float | None = None) -> str:
    """Return a drawing at most ``width`` characters wide; idle time is dots.

    The label of a pass stands in its time, and is cut if the time is too short. Passes too short
    for one column are left out.

    Args:
        timeline: the timeline to draw.
        width: characters of a line.
        until: draw only passes that begin before this time; by default all.
    """
    label = len(f"rank {timeline.ranks - 1} ")
    columns = max(1, width - label)
    end = timeline.end if until is None else min(until, timeline.end)
    scale = columns / end if end else 0.0
    lines = []
    for rank in range(timeline.ranks):
        cells = ["."] * columns
        for span in timeline.compute(rank):
            first, last = round(span.start * scale), min(round(span.end * scale), columns)
            text = span.label.ljust(last - first, "-")[: last - first]
            if last - first > len(span.label):
                text = text[:-1] + "|"
            cells[first:last] = text
        lines.append(f"rank {rank}".ljust(label) + "".join(cells))
    return "\n".join(lines)
