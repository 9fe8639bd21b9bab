#!/usr/bin/env python3
"""Compare a planned and a real timeline: totals, passes, overlap, idle time by cause.

python tools/compare_timelines.py run.planned.json run.json --draw both.svg
python tools/compare_timelines.py run.planned.json run.json --draw part.svg --window m8:m11

--record-timeline run.json writes both, in seconds. A rank idles for one of five reasons: it waits
for a peer's activation or gradient; it waits for a collective of the vocabulary (barrier); it waits
for its replicas; it waits for nothing, but its host is late to issue the next pass; or it is done
before the others.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.commands.arguments import picture_flag, window_flag, write_picture
from megatron.flags.command import read
from megatron.flags.declare import flag, positional
from megatron.flags.readable import told_as_error
from megatron.simulator.compare import Bubble, Comparison, Pair, compare
from megatron.simulator.draw.picture import Panel, Picture, lay_out
from megatron.simulator.draw.stretches import WHOLE, Window
from megatron.simulator.simulate import Timeline
from megatron.simulator.timeline_file import load_timeline

CAUSES = ("for a peer", "for a barrier", "for replicas", "host gaps", "done")
"""Why a rank idles, in the order of ``Bubble``."""

NOTABLE = 0.05
"""A rank is named if its ratio differs from the ratio of all ranks by more than this share."""


def report(comparison: Comparison) -> str:
    """Return a comparison as text."""
    return "\n".join(
        [
            f"{'':24}{'planned':>12}{'real':>12}{'real/planned':>14}",
            _times("iteration", comparison.total),
            _shares("idle", comparison.idle),
            "mean time of a pass",
            *_passes(comparison),
            "time of collectives during which their ranks compute",
            *(_shares(f"  {kind}", pair) for kind, pair in comparison.overlap.items()),
            "share of the iteration that a rank idles",
            f"{'':16}" + "".join(f"{cause:>14}" for cause in CAUSES),
            *_bubbles(comparison),
        ]
    )


def _passes(comparison: Comparison) -> Iterator[str]:
    for kind, times in comparison.passes.items():
        yield _times(f"  {kind}", times.mean)
        for rank, pair in times.by_rank.items():
            if abs(pair.ratio - times.mean.ratio) > NOTABLE * times.mean.ratio:
                yield _times(f"    rank {rank}", pair)


def _bubbles(comparison: Comparison) -> Iterator[str]:
    for rank, (planned, real) in enumerate(comparison.bubbles):
        yield _bubble(f"  rank {rank}, plan", planned)
        yield _bubble(f"  rank {rank}, real", real)


def _bubble(name: str, bubble: Bubble) -> str:
    return f"{name:16}" + "".join(f"{share:>14.1%}" for share in astuple(bubble))


def _times(name: str, pair: Pair) -> str:
    return f"{name:24}{pair.planned:>12.4g}{pair.real:>12.4g}{pair.ratio:>14.3f}"


def _shares(name: str, pair: Pair) -> str:
    return f"{name:24}{pair.planned:>12.1%}{pair.real:>12.1%}"


def draw(
    planned: Timeline, real: Timeline, comparison: Comparison, window: Window = WHOLE
) -> Picture:
    """Return both timelines above one another, on one time scale, in ``window``."""
    panels = [
        Panel(f"{name}: {time:.4g} s, {idle:.1%} idle", timeline)
        for name, timeline, time, idle in zip(
            Pair._fields, (planned, real), comparison.total, comparison.idle, strict=True
        )
    ]
    return lay_out(panels, unit="s", window=window)


@dataclass(frozen=True)
class CompareFlags:
    """What is compared."""

    planned: Path = positional("Timeline as it was simulated.", "PLANNED")
    real: Path = positional("Timeline as it was recorded, of the same plan.", "REAL")
    draw: Path | None = picture_flag("Draw both above one another.")
    window: Window = window_flag("--draw")
    json: bool = flag(False, "Print the comparison as one JSON object.")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command.

    Raises:
        ValueError: if the files hold no timelines, or timelines of different plans, or nothing runs
            in the window.
        OSError: if a file cannot be read or written.
    """
    options = read(argv, __doc__, CompareFlags)[CompareFlags]
    planned, real = load_timeline(options.planned), load_timeline(options.real)
    comparison = compare(planned, real)
    if options.draw is not None:
        write_picture(draw(planned, real, comparison, options.window), options.draw)
    print(json.dumps(comparison.as_json(), indent=1) if options.json else report(comparison))


if __name__ == "__main__":
    with told_as_error(OSError, ValueError):
        main()
