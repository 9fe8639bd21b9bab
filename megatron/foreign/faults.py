"""The error that a script or a configuration cannot be read, and the limits of reading."""

from typing import Final

LARGEST_FILE: Final = 1 << 20
"""Bytes of the largest script or configuration that is read."""

LONGEST_VALUE: Final = 1_000_000
"""Characters of the longest value of a variable."""

MOST_TEXT: Final = 20_000_000
"""Characters of all values that a script makes."""

MOST_STEPS: Final = 20_000
"""Commands and branches that are looked at, those of loops and functions each time."""

MOST_LOOKS: Final = 500_000
"""Commands that are looked at to find what they assign, each time."""

MOST_FLAGS: Final = 1_000
"""Flags of the longest line."""

MOST_WORDS: Final = 20_000
"""Words of the longest line; blends of corpora have thousands."""

MOST_LAUNCHES: Final = 16
"""Trainings of a script that are answered at once."""

MOST_SOURCED: Final = 300
"""Times that a script reads other files."""

DEEPEST: Final = 40
"""Levels of commands within commands, of functions that call functions, and of texts that are read
as commands."""


class ScriptError(ValueError):
    """A script cannot be read. The message names the line, the fault and the way out.

    Args:
        line: number of the line, from 1.
        fault: the fault and the way out.
    """

    def __init__(self, line: int, fault: str) -> None:
        super().__init__(f"line {line}: {fault}")


class SourcedError(ScriptError):
    """A fault in a file that a script sources.

    Args:
        line: number of the line that sources the file.
        fault: the file, and the fault in it or in the innermost of the files that it sources.

    Attributes:
        innermost: the fault, without the files between the innermost one and this one.
    """

    def __init__(self, line: int, fault: str) -> None:
        super().__init__(line, fault)
        self.innermost = fault
