"""Draw a gallery of schedules, or a recorded run.

draw-schedule --into FOLDER                # the pictures that the README shows
draw-schedule --timeline timeline.json     # what --record-timeline wrote, to timeline.svg

In the picture of a schedule, F, B and W of a rank's layers take one unit each, and S and T take a
quarter; communications are free. The picture of the treatments, 1f1b_vocab, has whole backwards.
Its output layer is that of V = 256k at hidden size 4096, sequence length 2048 and 4 transformer
layers per stage: V / (12 h + 2 s) = 4.8 layers (arXiv 2411.05288, section 2), or 1.2 stages. Its
communications are long enough to be visible.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from megatron.commands.arguments import Parser, add_window, check_window, write_picture
from megatron.schedules.catalogue import SCHEDULES
from megatron.schedules.costs import Costs
from megatron.schedules.needs import CommKind
from megatron.schedules.request import Request
from megatron.simulator.costs.cost_file import DEFAULT_COSTS
from megatron.simulator.draw.picture import Panel, Picture, lay_out
from megatron.simulator.draw.stretches import Window
from megatron.simulator.scenario import Scenario, run
from megatron.simulator.timeline_file import load_timeline

RANKS: Final = 4
MICROBATCHES: Final = 8
OUTPUT_LAYER: Final = 1.2
COMMS: Final[Mapping[CommKind, float]] = {
    "X": 0.1, "G": 0.1, "C0": 0.2, "C1": 0.3, "C2": 0.2, "CIF": 0.2, "CIB": 0.2
}  # fmt: skip
WITH_COMMS: Final = Costs({"F": 1.0, "B": 2.0, "E": 0.2, "IF": 0.1, "IB": 0.1}, COMMS)

TREATMENT_TITLES: Final[Mapping[str, str]] = {
    "none": "vocabulary layers on the first and the last stage",
    "vocab-2": "vocabulary parallelism, one barrier (vocab-2, the default)",
    "vocab-1": "vocabulary parallelism, two barriers (vocab-1)",
}

Panels = Mapping[str, Scenario]
"""Treatment of a panel -> its title."""


def schedule_panels(schedule: str) -> Panels:
    """Return the panels of a schedule: by itself, and with vocab-2."""
    costs = DEFAULT_COSTS.per_chunk(SCHEDULES[schedule].chunks)
    title = SCHEDULES[schedule].title
    return {
        title: Scenario(Request(schedule, "none", RANKS, MICROBATCHES, costs)),
        f"{title} with vocab-2": Scenario(Request(schedule, "vocab-2", RANKS, MICROBATCHES, costs)),
    }


def vocabulary_panels() -> Panels:
    """Return a panel of 1F1B for every treatment."""
    return {
        f"1F1B, {title}": Scenario(
            Request("1f1b", treatment, RANKS, MICROBATCHES, WITH_COMMS), OUTPUT_LAYER
        )
        for treatment, title in TREATMENT_TITLES.items()
    }


def pictures() -> dict[str, Panels]:
    """Return the panels of every picture by its file's name."""
    return {
        "1f1b_vocab.svg": vocabulary_panels(),
        **{
            f"{name}.svg": schedule_panels(name)
            for name, schedule in SCHEDULES.items()
            if not schedule.searched
        },
    }


def draw(panels: Panels) -> Picture:
    """Return the picture of ``panels``."""
    drawn = []
    for title, case in panels.items():
        done = run(case)
        bubble, held = done.timeline.bubble_rate(), max(done.in_flight)
        drawn.append(
            Panel(f"{title}: bubble {bubble:.1%}, {held:g} microbatches in flight", done.timeline)
        )
    return lay_out(drawn)


def draw_recorded(path: Path, window: Window) -> None:
    """Draw a recorded timeline, or the part of it in ``window``, beside its file.

    Raises:
        ValueError: if the file holds no timeline, or nothing runs in the window.
        OSError: if it cannot be read, or the picture not be written.
    """
    timeline = load_timeline(path)
    title = f"{path.stem}: bubble {timeline.bubble_rate():.1%}"
    picture = path.with_suffix(".svg")
    write_picture(lay_out([Panel(title, timeline)], unit="s", window=window), picture)
    print(picture)


def draw_gallery(folder: Path) -> None:
    """Draw all pictures into ``folder``, which is made if it is missing.

    Raises:
        OSError: if a picture cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, panels in pictures().items():
        write_picture(draw(panels), folder / name)
        print(folder / name)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; an error ends the process with one line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--into", type=Path, metavar="FOLDER", help="draw the gallery into it")
    what.add_argument("--timeline", type=Path, metavar="FILE", help="draw this recorded timeline")
    add_window(parser.add_argument)
    options = parser.parse_args(argv)
    try:
        check_window(options.window, {"--timeline": options.timeline is not None})
        if options.timeline is not None:
            draw_recorded(options.timeline, options.window)
        else:
            draw_gallery(options.into)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
