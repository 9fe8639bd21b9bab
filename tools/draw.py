#!/usr/bin/env python3
"""Draw the pictures of images/ anew, or a recorded run: the command draw-schedule, from a checkout.

python tools/draw.py
python tools/draw.py --timeline timeline.json    # what --record-timeline wrote, to timeline.svg
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.commands.draw_schedule import main

IMAGES = Path(__file__).resolve().parents[1] / "images"

if __name__ == "__main__":
    # Installed, the command must be told where to draw; a checkout has a folder for the pictures.
    main(sys.argv[1:] or ["--into", str(IMAGES)])
