#!/usr/bin/env python3
"""Draw the pictures of images/ anew, or a recorded run.

python tools/draw.py
python tools/draw.py --timeline timeline.json    # what --record-timeline wrote, to timeline.svg

A picture of a schedule has the time of a whole stage as its unit, for F, B and W each, and S and T
take a quarter; communications are free. The others have B with its weight gradient, and the output
layer of V = 256k at hidden size 4096, sequence length 2048 and 4 transformer layers a stage:
V / (12 h + 2 s) = 4.8 layers (arXiv 2411.05288, section 2), or 1.2 stages. Communications take what
makes them visible there.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.schedules.catalogue import SCHEDULES
from megatron.schedules.costs import Costs
from megatron.schedules.needs import CommKind
from megatron.schedules.request import Request
from megatron.simulator.costs.cost_file import DEFAULT_COSTS
from megatron.simulator.draw.picture import Panel, lay_out
from megatron.simulator.draw.svg import paint_svg
from megatron.simulator.scenario import Scenario, run
from megatron.simulator.timeline_file import load_timeline

RANKS: Final = 4
OUTPUT_LAYER: Final = 1.2
RECORDED_WIDTH: Final = 1800
COMMS: Final[Mapping[CommKind, float]] = {
    "X": 0.1, "G": 0.1, "C0": 0.2, "C1": 0.3, "C2": 0.2, "C3": 0.2, "CIF": 0.2, "CIB": 0.2
}  # fmt: skip
WITH_COMMS: Final = Costs({"F": 1.0, "B": 2.0, "E": 0.2, "IF": 0.1, "IB": 0.1}, COMMS)

TREATMENTS: Final[Mapping[str, str]] = {
    "none": "vocabulary layers on the first and the last stage",
    "naive": "vocabulary parallelism, three barriers (naive)",
    "vocab-1": "vocabulary parallelism, two barriers (vocab-1)",
    "vocab-2": "vocabulary parallelism, one barrier (vocab-2, the default)",
    "interlaced": "interlaced, the output layer on all ranks at once",
}

Panels = Mapping[str, Scenario]
"""Title -> what it shows."""


def schedule_panels(schedule: str) -> Panels:
    """Return the panels of a schedule: by itself, and with vocab-2."""
    costs = DEFAULT_COSTS.per_chunk(SCHEDULES[schedule].chunks)
    title = SCHEDULES[schedule].title
    return {
        title: Scenario(Request(schedule, "none", RANKS, 8, costs)),
        f"{title} with vocab-2": Scenario(Request(schedule, "vocab-2", RANKS, 8, costs)),
    }


def vocabulary_panels(treatments: Sequence[str], microbatches: int) -> Panels:
    """Return a panel of 1F1B for every treatment."""
    return {
        f"1F1B, {TREATMENTS[treatment]}": Scenario(
            Request("1f1b", treatment, RANKS, microbatches, WITH_COMMS), OUTPUT_LAYER
        )
        for treatment in treatments
    }


def pictures() -> dict[str, Panels]:
    """Return the panels of every picture by its file's name."""
    return {
        "1f1b_vocab.svg": vocabulary_panels(("none", "vocab-2", "vocab-1"), 8),
        "vocabulary_passes.svg": vocabulary_panels(
            ("naive", "vocab-1", "vocab-2", "interlaced"), 3
        ),
        **{
            f"{name}.svg": schedule_panels(name)
            for name, schedule in SCHEDULES.items()
            if not schedule.searched
        },
    }


def draw(panels: Panels) -> str:
    """Return the picture of ``panels`` as SVG."""
    drawn = []
    for title, case in panels.items():
        done = run(case)
        bubble, held = done.timeline.bubble_rate(), max(done.in_flight)
        drawn.append(
            Panel(f"{title}: bubble {bubble:.1%}, {held:g} microbatches in flight", done.timeline)
        )
    return paint_svg(lay_out(drawn))


def draw_recorded(path: Path) -> None:
    """Draw a recorded timeline beside its file.

    Raises:
        ValueError: if the file holds no timeline.
        OSError: if it cannot be read, or the picture not be written.
    """
    timeline = load_timeline(path)
    title = f"{path.stem}: bubble {timeline.bubble_rate():.1%}"
    picture = path.with_suffix(".svg")
    picture.write_text(paint_svg(lay_out([Panel(title, timeline)], RECORDED_WIDTH, unit="s")))
    print(picture)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    images = Path(__file__).resolve().parents[1] / "images"
    parser.add_argument("--into", type=Path, default=images, help="folder (default: images/)")
    parser.add_argument("--timeline", type=Path, help="draw this recorded timeline instead")
    options = parser.parse_args(argv)
    if options.timeline is not None:
        draw_recorded(options.timeline)
        return
    options.into.mkdir(parents=True, exist_ok=True)
    for name, panels in pictures().items():
        (options.into / name).write_text(draw(panels))
        print(options.into / name)


if __name__ == "__main__":
    try:
        main()
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
