"""A terminal of the plainest kind: text, new lines, colours, going up, erasing in a line.

Anything else that is sent to it is a mistake, above all what would have to be switched off again.
"""

import io
import re

CONTROL = re.compile(
    r"\x1b\[(?P<up>\d+)A|(?P<erase>\x1b\[2?K)|\x1b\[[\d;]*m|(?P<text>[^\x1b])", re.S
)


class Screen(io.StringIO):
    """What a terminal shows, and what had scrolled out of it."""

    def __init__(self) -> None:
        super().__init__()
        self.lines = [""]
        self.row = self.column = 0
        self.writes = 0

    def isatty(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]  # a plain attribute in the base class
        return "utf-8"

    def write(self, text: str) -> int:
        self.writes += bool(text)
        self.feed(text)
        return len(text)

    def feed(self, text: str) -> None:
        """Show what is sent."""
        position = 0
        while position < len(text):
            found = CONTROL.match(text, position)
            assert found is not None, f"unknown to this terminal: {text[position : position + 9]!r}"
            position = found.end()
            if found["up"]:
                self.row -= int(found["up"])
                assert self.row >= 0, "above the first line that was ever printed"
            elif found["erase"]:
                kept = 0 if "2" in found["erase"] else self.column
                self.lines[self.row] = self.lines[self.row][:kept]
            elif found["text"] is not None:
                self._put(found["text"])

    def _put(self, character: str) -> None:
        if character == "\r":
            self.column = 0
        elif character == "\n":
            self.row, self.column = self.row + 1, 0
            if self.row == len(self.lines):
                self.lines.append("")
        else:
            line = self.lines[self.row].ljust(self.column)
            self.lines[self.row] = line[: self.column] + character + line[self.column + 1 :]
            self.column += 1

    @property
    def shown(self) -> str:
        """All lines to the cursor's, and below it to the last that is not empty."""
        told = [number for number, line in enumerate(self.lines) if line or number == self.row]
        return "\n".join(self.lines[: max(told) + 1])
