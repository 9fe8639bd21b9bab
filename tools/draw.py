#!/usr/bin/env python3
"""Draw the pictures of images/ anew, or a recorded run: seconds, one row of passes per rank.

python tools/draw.py
python tools/draw.py --timeline timeline.json    # what --record-timeline wrote, to timeline.svg

The output layer's time is that of V = 256k at hidden size 4096, sequence length 2048 and 4
transformer layers a stage: V / (12 h + 2 s) = 4.8 layers (arXiv 2411.05288, section 2), or 1.2
stages. Communications take what makes them visible.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.schedules.needs import CommKind
from megatron.simulator.picture import Panel, draw_svg
from megatron.simulator.timeline_file import load_timeline
from tools.simulate import Case

OUTPUT_LAYER: Final = 1.2
COMMS: Final[Mapping[CommKind, float]] = {
    "X": 0.1, "G": 0.1, "C0": 0.2, "C1": 0.3, "C2": 0.2, "CIF": 0.2, "CIB": 0.2
}  # fmt: skip

PICTURES: Final[Mapping[str, Mapping[str, Case]]] = {
    "1f1b_vocab.svg": {
        title: Case("1f1b", vocab, 4, 8, OUTPUT_LAYER, comms=COMMS)
        for title, vocab in (
            ("1F1B, vocabulary layers on the first and the last rank", "none"),
            ("1F1B with vocabulary parallelism, one barrier (vocab-2, the default)", "vocab-2"),
            ("1F1B with vocabulary parallelism, two barriers (vocab-1)", "vocab-1"),
        )
    },
}
"""File name -> title of each panel -> what it shows."""


def draw(cases: Mapping[str, Case]) -> str:
    """Return the picture of ``cases``, one panel each, as SVG."""
    panels = []
    for title, case in cases.items():
        timeline, held = case.run()
        figures = f"{timeline.bubble_rate():.0%} idle, {max(held):g} microbatches in flight"
        panels.append(Panel(f"{title}: {figures}", timeline))
    return draw_svg(panels, unit="F")


def draw_recorded(path: Path) -> None:
    """Draw a recorded timeline beside its file."""
    try:
        timeline = load_timeline(path)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    title = f"{path.stem}: {timeline.bubble_rate():.0%} idle"
    picture = path.with_suffix(".svg")
    picture.write_text(draw_svg([Panel(title, timeline)], width=1800, unit="s"))
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
    folder = options.into
    folder.mkdir(parents=True, exist_ok=True)
    for name, cases in PICTURES.items():
        (folder / name).write_text(draw(cases))
        print(folder / name)


if __name__ == "__main__":
    main()
