"""Words, their pieces, and operators, of which a shell script consists."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["text", "variable", "command", "sum"]
"""Kinds of pieces: text as it stands; the inside of ${...}; of $(...); of $((...))."""


@dataclass(frozen=True)
class Piece:
    """A part of a word.

    Attributes:
        kind: see ``Kind``.
        text: the text itself, or the inside of the brackets.
        quoted: whether it stands in quotes, so that its value is not split into words.
        source: the piece as written.
    """

    kind: Kind
    text: str
    quoted: bool
    source: str


@dataclass(frozen=True)
class Word:
    """A word of a command.

    Attributes:
        pieces: its parts.
        line: number of its line, from 1.
        elements: words in the brackets of ``NAME=(...)``; ``None``: the word has no brackets.
    """

    pieces: tuple[Piece, ...]
    line: int
    elements: "tuple[Word, ...] | None" = None

    @property
    def plain(self) -> str | None:
        """The word if it is text without quotes, as reserved words are; else ``None``."""
        if self.elements is None and all(p.kind == "text" and not p.quoted for p in self.pieces):
            return "".join(piece.text for piece in self.pieces)
        return None

    @property
    def source(self) -> str:
        """The word about as it is written, for messages."""
        own = "".join(piece.source for piece in self.pieces)
        return own if self.elements is None else f"{own}(...)"


@dataclass(frozen=True)
class Operator:
    """An operator such as ``&&``, or the end of a line, which is ``;`` too.

    Attributes:
        text: the operator.
        line: number of its line, from 1.
    """

    text: str
    line: int

    @property
    def redirects(self) -> bool:
        """Whether a word behind the operator names a file."""
        return "<" in self.text or ">" in self.text


Token = Word | Operator
