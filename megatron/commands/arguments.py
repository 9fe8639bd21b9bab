"""Helpers of the commands: a parser with one-line errors, numbers in a range, picture files."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from megatron.simulator.draw.picture import Picture
from megatron.simulator.draw.svg import paint_svg


class Parser(argparse.ArgumentParser):
    """A parser that reports an error in one line, as all commands do."""

    def error(self, message: str) -> NoReturn:
        """End the process with status 2."""
        self.exit(2, f"error: {message}\n")


def number(least: float, kind: type[int] | type[float] = int) -> Callable[[str], float]:
    """Return a function that reads a finite number of at least ``least``."""

    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = kind(least) - 1
        if not least <= value < math.inf:
            wanted = "whole number" if kind is int else "number"
            raise argparse.ArgumentTypeError(f"'{text}': give a {wanted}, {least:g} or more")
        return value

    return read


def picture_file(text: str) -> Path:
    """Read the name of a picture's file."""
    path = Path(text)
    if path.suffix.lower() != ".svg":
        raise argparse.ArgumentTypeError(f"'{text}': end it in .svg")
    return path


def write_picture(picture: Picture, path: Path) -> None:
    """Write ``picture`` as SVG.

    Raises:
        OSError: if the file cannot be written.
    """
    path.write_text(paint_svg(picture))
