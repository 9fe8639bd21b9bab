"""The colours and words of every kind of pass and communication, for all pictures alike."""

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

COLOURS: Final[Mapping[str, str]] = {
    "F": "#6ea8e8",
    "R": "#a5dbe0",
    "B": "#f2a65a",
    "W": "#7cc47f",
    "S": "#f9e79b",
    "E": "#f0d05c",
    "T": "#dcb11f",
    "IF": "#c3a5e6",
    "IB": "#9a6fd0",
    "U": "#b8c98a",
    "X": "#2f6db5",
    "G": "#c06a14",
    "C0": "#8d8d8d",
    "C1": "#d1495b",
    "C2": "#7d1d2e",
    "C3": "#3d0f18",
    "CIF": "#8f79c9",
    "CIB": "#5b3a99",
    "RG": "#2e7d52",
    "AG": "#7a8b3c",
    "O": "#b0679b",
    "L": "#7d3c6b",
    "tokens-F": "#1f6f8b",
    "tokens-R": "#4d9fa6",
    "tokens-B": "#a8431f",
    "tokens-W": "#3f7f43",
}
"""Fill of every kind of pass and communication; the paler shades carry the numbers."""

MEANINGS: Final[Mapping[str, str]] = {
    "F": "forward",
    "R": "recomputation",
    "B": "backward",
    "W": "weight gradient",
    "S": "output layer before its barrier",
    "E": "output layer between barriers",
    "T": "output layer after its barrier",
    "IF": "input layer forward",
    "IB": "input layer backward",
    "U": "update of a bucket",
    "X": "activation",
    "G": "gradient",
    "C0": "broadcast for S",
    "C1": "barrier 1",
    "C2": "barrier 2",
    "C3": "barrier 3",
    "CIF": "embedding",
    "CIB": "its gradient",
    "RG": "reduction over replicas",
    "AG": "gathering from replicas",
    "O": "copy to the host",
    "L": "copy from the host",
    "tokens-F": "tokens of an F travel",
    "tokens-R": "tokens of an R travel",
    "tokens-B": "tokens of a B travel",
    "tokens-W": "tokens of a W travel",
}
"""Meaning of every kind, for the legend."""

BACKGROUND: Final = "#ffffff"
FRAME: Final = "#d0d7de"
IDLE: Final = "#f3f4f6"
EDGE: Final = "#1f2328"
EDGE_OPACITY: Final = 0.45
EDGE_WIDTH: Final = 0.5
AXIS: Final = "#8c959f"
INK: Final = "#1f2328"
LATER_CHUNK_OPACITY: Final = 0.5  # of a rank's chunks after its first

FONT_SIZE: Final = 9.5
GLYPH: Final = 0.58 * FONT_SIZE
"""Width of a digit in pixels, or a generous width of the average letter."""

Role = Literal["plain", "number", "tick", "title"]


class Font(NamedTuple):
    """The look of a text by its role; the size is in pixels."""

    size: float
    centred: bool
    bold: bool


FONTS: Final[Mapping[Role, Font]] = {
    "plain": Font(FONT_SIZE, centred=False, bold=False),
    "number": Font(FONT_SIZE, centred=True, bold=False),
    "tick": Font(FONT_SIZE, centred=True, bold=False),
    "title": Font(13.0, centred=False, bold=True),
}
