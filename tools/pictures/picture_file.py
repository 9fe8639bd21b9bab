"""Write a picture in the format that its file's name ends in."""

import argparse
from pathlib import Path
from typing import Final

from megatron.simulator.draw.picture import Picture
from megatron.simulator.draw.svg import paint_svg
from tools.pictures.png import paint_png

ENDINGS: Final = (".svg", ".png")


def picture_file(text: str) -> Path:
    """Read the name of a picture's file from a command line."""
    path = Path(text)
    if path.suffix.lower() not in ENDINGS:
        raise argparse.ArgumentTypeError(f"'{text}': end it in {' or '.join(ENDINGS)}")
    return path


def write_picture(picture: Picture, path: Path) -> None:
    """Write ``picture``; ``path`` is what ``picture_file`` has read.

    Raises:
        ValueError: if it is a PNG and matplotlib is missing, or the picture too large for that.
        OSError: if the file cannot be written.
    """
    if path.suffix.lower() == ".png":
        paint_png(picture, path)
    else:
        path.write_text(paint_svg(picture))
