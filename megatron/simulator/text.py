"""Draw a timeline as text: one row per rank, one column per unit of time."""

from megatron.simulator.simulate import Timeline


def draw_text(timeline: Timeline, width: int = 120) -> str:
    """Return a drawing at most ``width`` characters wide; idle time is dots.

    Each pass fills its time with its label, cut where the time is too short for it; passes too
    short for one column are left out.
    """
    label = len(f"rank {timeline.ranks - 1} ")
    columns = max(1, width - label)
    scale = columns / timeline.end if timeline.end else 0.0
    lines = []
    for rank in range(timeline.ranks):
        cells = ["."] * columns
        for span in timeline.compute(rank):
            first, last = round(span.start * scale), round(span.end * scale)
            text = span.label.ljust(last - first, "-")[: last - first]
            if last - first > len(span.label):
                text = text[:-1] + "|"
            cells[first:last] = text
        lines.append(f"rank {rank}".ljust(label) + "".join(cells))
    return "\n".join(lines)
